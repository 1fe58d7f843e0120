import json
import os
import re
import runpy
import shutil

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from scgpu_tasks import errors

from .conftest import FLOW

N_OBS, N_VARS = 120, 60


def counts(kind="csr"):
    rng = np.random.default_rng(3)
    dense = rng.poisson(1.0, (N_OBS, N_VARS)).astype(np.float32)
    return {"csr": sp.csr_matrix, "csc": sp.csc_matrix, "dense": np.asarray}[kind](dense)


@pytest.fixture
def write(tmp_path):
    def write(x, **parts):
        obs = pd.DataFrame(
            {"batch": pd.Categorical(["a", "b"] * (N_OBS // 2))},
            index=[f"cell{i}" for i in range(N_OBS)],
        )
        var = pd.DataFrame(index=[f"gene{i}" for i in range(N_VARS)])
        path = tmp_path / "bad.zarr"
        ad.AnnData(x, obs=obs, var=var, **parts).write_zarr(path)
        return path

    return write


def with_value(value, at=(7, 5)):
    x = counts().tolil()
    x[at] = value
    return x.tocsr()


def nothing(write, tmp_path):
    return tmp_path / "nowhere.zarr"


def not_anndata(write, tmp_path):
    import zarr

    path = tmp_path / "plain.zarr"
    zarr.create_group(path).create_array("X", shape=(3, 3), dtype="f4")
    return path


def no_x(write, tmp_path):
    return write(None)


def csc_x(write, tmp_path):
    return write(counts("csc"))


def negative(write, tmp_path):
    return write(with_value(-1))


def missing_value(write, tmp_path):
    return write(with_value(np.nan))


def late_negative(write, tmp_path):
    return write(with_value(-3, at=(N_OBS - 1, 2)))


def log_normalised(write, tmp_path):
    return write(counts().log1p())


def good(write, tmp_path):
    return write(counts())


SMALL = {"min_genes": 1, "n_top_genes": 40, "n_comps": 5}
BAD = [
    (nothing, {}, errors.StoreError, r"no store at .*nowhere\.zarr"),
    (not_anndata, {}, errors.FormatError, r"plain\.zarr"),
    (no_x, {}, errors.FormatError, r"X"),
    (csc_x, {}, errors.FormatError, r"(?i)csc.*convert|convert.*csc"),
    (negative, {}, errors.DataError, r"cell7.*gene5"),
    (missing_value, {}, errors.DataError, r"cell7.*gene5"),
    (late_negative, {}, errors.DataError, r"cell119.*gene2"),
    (log_normalised, {}, errors.DataError, r"(?i)log"),
    (good, {"min_genes": 59}, errors.ScgpuError, r"(?i)no cell"),
    (good, {"n_comps": 50}, errors.ParameterError, r"n_comps=50.*40"),
    (good, {"n_comps": 500}, errors.ParameterError, r"n_comps=500.*120"),
    (good, {"batch_key": "donor"}, errors.ParameterError, r"'donor'.*batch"),
    (good, {"layer": "raw_counts"}, errors.ScgpuError, r"raw_counts"),
    (good, {"min_genes": 9, "max_genes": 3}, errors.ParameterError, r"min_genes=9"),
    (good, {"refresh": "umap"}, errors.ParameterError, r"convert, check, load, qc, pca"),
    (good, {"scheduler": "tcp://127.0.0.1:1"}, errors.ClusterError, r"127\.0\.0\.1:1"),
    (good, {"device": "gpu"}, errors.ClusterError, r"workers at tcp://.* see no GPU"),
]


@pytest.mark.parametrize(
    ("make", "parameters", "kind", "match"),
    BAD,
    ids=[f"{m.__name__}-{'-'.join(p)}".rstrip("-") for m, p, _, _ in BAD],
)
def test_bad_input_is_refused_with_a_clear_message_and_a_record(
    runs, write, tmp_path, make, parameters, kind, match
):
    store = make(write, tmp_path)
    error, record = runs.failure(store, **{**SMALL, **parameters})
    assert isinstance(error, kind)
    message = " ".join(str(error).split())
    assert re.search(match, message), message
    assert record["state"] == "failed"
    assert " ".join(record["error"]["message"].split()).startswith(message[:60])
    assert record["parameters"]["store"] == str(store)
    states = [entry["state"] for entry in record["stages"].values()]
    assert "running" not in states
    assert (states.count("failed") == 1) == (record["error"]["stage"] != "start")


def test_a_truncated_chunk_is_named_with_array_shard_and_chunk(runs, small_store, tmp_path):
    store = shutil.copytree(small_store, tmp_path / "cut.zarr")
    shard = sorted(p for p in (store / "X" / "data" / "c").rglob("*") if p.is_file())[-1]
    os.truncate(shard, shard.stat().st_size // 2)
    error, record = runs.failure(store)
    assert isinstance(error, errors.CorruptChunkError)
    assert error.array == "X/data"
    assert shard.name in error.shard
    assert "X/data" in record["error"]["message"]
    assert record["stages"][record["error"]["stage"]]["state"] == "failed"


def test_an_unwritable_out_is_refused_before_anything_else(runs, small_store, tmp_path):
    (tmp_path / "file").write_text("in the way")
    runs.out = tmp_path / "file" / "runs"
    with pytest.raises(errors.OutputError, match="--out"):
        runs.run(small_store)


def test_a_failed_run_is_followed_by_a_good_one_in_the_same_folder(runs, write):
    store = write(counts())
    runs.failure(store, **{**SMALL, "n_comps": 50})
    record = runs.run(store, **SMALL)
    assert record["state"] == "completed"
    assert record["stages"]["check"]["state"] == "cached"
    assert len(runs.records()) == 2


def test_the_command_line_fails_with_one_paragraph_and_code_1(shell_with_server, tmp_path):
    done = shell_with_server.run("--store", str(tmp_path / "nowhere.zarr"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: there is no store at")
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
    record = shell_with_server.record()
    assert record["state"] == "failed"
    assert record["error"]["type"] == "StoreError"
    assert json.dumps(record["parameters"])
    assert done.stderr.endswith(
        f"record: {shell_with_server.out}/{record['name']}/report.html\n"
    )


@pytest.fixture
def main_without_server(tmp_path, monkeypatch):
    """The command line, in an empty folder, where starting a server fails."""
    main = runpy.run_path(str(FLOW), run_name="__mp_main__")["main"]
    monkeypatch.chdir(tmp_path)

    def start():
        msg = "a server was started"
        raise AssertionError(msg)

    monkeypatch.setattr("scgpu_tasks.job.commandline.prefect_api", start)
    # As in a new process.
    monkeypatch.setattr("scgpu_tasks.job.runlog._announced", None)
    return lambda *options: main(list(options))


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        (["--store={h5ad}"], "FormatError", r"--source .*bad\.h5ad --store .*bad\.zarr"),
        (["--store=new.zarr", "--source=none.h5ad"], "StoreError", "no source at"),
        (["--store={store}", "--source={h5ad}"], "OutputError", "exists"),
        (["--store=new.zarr", "--source={h5ad}"], "DataError", r"cell7.*gene5.*--not-counts"),
        (["--store={store}", "--batch-key=donor"], "ParameterError", r"'donor'.*batch"),
        (["--store={h5ad}", "--source={h5ad}"], "ParameterError", "both --source and --store"),
        (["--store={store}", "--n-comps=5000"], "ParameterError", "n_comps=5000 must be below"),
        (
            ["--store={store}", "--percent-top=50,61"],
            "ParameterError",
            "percent_top=61 .* 60 g",
        ),
    ],
)
def test_what_is_known_at_once_is_refused_before_anything_is_started(
    main_without_server, write, tmp_path, capsys, options, kind, match
):
    bad = ad.read_zarr(write(with_value(0.5)))
    bad.write_h5ad(tmp_path / "bad.h5ad")
    store = write(counts())
    given = [o.format(h5ad=tmp_path / "bad.h5ad", store=store) for o in options]
    assert main_without_server("--n-top-genes=40", "--n-comps=5", *given) == 1
    err = capsys.readouterr().err
    assert re.search(match, err)
    (path,) = (tmp_path / "runs").glob("*/run.json")
    record = json.loads(path.read_text())
    assert record["error"]["type"] == kind
    assert f"record: {path.parent}/report.html" in err


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--target-sum=inf", "target_sum must be a finite number"),
        ("--target-sum=1e300", r"target_sum .* 1e-06 to 1e\+12, not 1e\+300"),
        ("--target-sum=1e-320", r"target_sum .* 1e-06 to 1e\+12"),
        ("--min-counts=nan", "min_counts must be a finite number"),
        ("--max-pct-mt=200", "max_pct_mt is a percentage"),
        ("--chunks=0", "chunks must be 1"),
        ("--workers=0", "workers must be at least 1"),
    ],
)
def test_a_value_that_is_wrong_for_every_store_leaves_no_record(
    main_without_server, tmp_path, capsys, option, words
):
    assert main_without_server("--store=any.zarr", option) == 1
    err = capsys.readouterr().err
    assert re.match(f"error: .*{words}", err)
    assert "record:" not in err
    assert list((tmp_path / "runs").iterdir()) == []


def test_options_that_do_not_parse_end_with_code_2_and_usage(shell):
    done = shell.run("--store", "x.zarr", "--n-comps", "many")
    assert done.returncode == 2
    assert "--n-comps: invalid int value: 'many'" in done.stderr
