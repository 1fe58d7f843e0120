# docker build --tag scgpu-tasks .
# docker build --tag scgpu-tasks:cu13 --build-arg EXTRA=cu13 .     (or cu12: by the host's driver)
FROM python:3.12-slim
ARG EXTRA=
WORKDIR /opt/scgpu_tasks
COPY pyproject.toml README.md LICENSE ./
COPY scgpu_tasks scgpu_tasks
COPY flows flows
RUN pip install --no-cache-dir ".${EXTRA:+[$EXTRA]}"
# Any user may run it: docker run --user "$(id -u):$(id -g)" ...
ENV HOME=/tmp NUMBA_CACHE_DIR=/tmp/numba
WORKDIR /data
ENTRYPOINT ["python", "/opt/scgpu_tasks/flows/qc_pca.py"]
