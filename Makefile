# First `make demo`, `make serve` or `make test`: they make .venv in this folder on first use.
# Another Python: make demo PYTHON=/path/to/python3.12

ifdef PYTHON
export PYTHON
endif

.PHONY: help demo serve deploy test docs coverage venv clean

help:
	@echo "make demo    make a small atlas, run the pipeline on it, say where the report is"
	@echo "make serve   start Prefect with a worker and the deployments here; Ctrl-C stops all of it"
	@echo "make deploy  deploy the flows to the Prefect server that is set up"
	@echo "make test    lint, types, layer rules and tests: what .ci/run runs"
	@echo "make docs    build the documentation, say where it is"
	@echo "make coverage  run the tests, list lines that none of them runs"
	@echo "make venv    only make the virtual environment .venv"
	@echo "make clean   remove .venv, demo/ and caches"

venv:
	@.ci/venv

demo: venv
	@.venv/bin/python -m scgpu_tasks.demo demo/atlas.h5ad
	@.venv/bin/python flows/qc_pca.py --source demo/atlas.h5ad --store demo/atlas.zarr --out demo/runs

demo/atlas.zarr: | venv
	@.venv/bin/python -m scgpu_tasks.demo demo/atlas.h5ad
	@.venv/bin/scgpu-tasks convert demo/atlas.h5ad demo/atlas.zarr

# What the deployments work on until they are told otherwise: the demo's atlas.
serve: venv demo/atlas.zarr
	@.venv/bin/python -m scgpu_tasks.operate.serve $(if $(PORT),--port $(PORT))

deploy: venv
	@.venv/bin/prefect --no-prompt deploy --all --prefect-file $(or $(FILE),deployments/prefect.yaml)

test:
	@.ci/run

docs:
	@.ci/venv docs
	@.venv/bin/sphinx-build -q -W --keep-going docs docs/_build/html
	@echo "Open docs/_build/html/index.html in a browser."

# Modules that do nothing without a GPU.
GPU = scgpu_tasks/kernels/_gpu/*,scgpu_tasks/cluster/gpus.py,scgpu_tasks/io/decode.py,scgpu_tasks/io/gpu_memory.py,scgpu_tasks/io/gpu_packages.py,scgpu_tasks/io/handover.py,scgpu_tasks/io/nvcomp.py,scgpu_tasks/io/scratch.py,scgpu_tasks/stages/resident.py

coverage:
	@.ci/venv test
	@COVERAGE_CORE=sysmon .venv/bin/python -m pytest -q -n 2 --dist loadfile --cov --cov-report= $(ARGS); \
	tests=$$?; \
	echo "Lines that any machine runs:"; \
	.venv/bin/coverage report --omit='$(GPU)'; \
	echo "Lines that only a GPU runs (pytest -m gpu):"; \
	.venv/bin/coverage report --include='$(GPU)'; \
	exit $$tests

clean:
	rm -rf .venv .venv-lowest demo build dist docs/_build docs/generated .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
