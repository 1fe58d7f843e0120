"""deployments/prefect.yaml and the forms that it gives the flows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text("utf-8"))


@pytest.fixture(scope="module", params=["atlas-qc", "atlas-convert"])
def deployment(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return a deployment, as the file has it."""
    (found,) = [d for d in DEPLOYMENTS["deployments"] if d["name"] == request.param]
    return dict(found)


@pytest.fixture(scope="module")
def form(deployment: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema from which the pages make the form."""
    from prefect.flows import load_flow_from_entrypoint
    from prefect.utilities.callables import parameter_schema

    path, _, name = deployment["entrypoint"].partition(":")
    return parameter_schema(load_flow_from_entrypoint(f"{ROOT / path}:{name}")).model_dump()


def test_every_parameter_has_a_type_a_description_and_a_default(
    deployment: dict[str, Any], form: dict[str, Any]
) -> None:
    for name, field in form["properties"].items():
        assert field["description"].endswith("."), name
        assert "type" in field or "anyOf" in field, name
        assert "default" in field or name in deployment["parameters"], name
    assert set(deployment["parameters"]) <= set(form["properties"])


def test_schedules_are_there_and_off(deployment: dict[str, Any]) -> None:
    assert [schedule["active"] for schedule in deployment["schedules"]] == [False]
    assert all(schedule["timezone"] for schedule in deployment["schedules"])


def test_one_run_at_a_time(deployment: dict[str, Any]) -> None:
    limit = {"limit": 1, "collision_strategy": "ENQUEUE"}
    assert deployment["concurrency_limit"] == limit


def test_nothing_of_the_deploying_machine_is_written_down(deployment: dict[str, Any]) -> None:
    written = [*deployment["parameters"].values(), deployment["entrypoint"]]
    assert not [value for value in written if str(value).startswith("/")]
    assert DEPLOYMENTS["pull"] == [{"scgpu_tasks.operate.checkout.enter_checkout": {}}]


def test_the_form_offers_what_can_be_chosen() -> None:
    from prefect.flows import load_flow_from_entrypoint
    from prefect.utilities.callables import parameter_schema

    flow = load_flow_from_entrypoint(f"{ROOT / 'flows' / 'qc_pca.py'}:atlas_qc")
    fields = parameter_schema(flow).model_dump()["properties"]
    assert fields["device"]["enum"] == ["auto", "cpu", "gpu"]
    assert fields["refresh"]["anyOf"][0]["enum"] == ["convert", "check", "load", "qc", "pca"]
    assert fields["n_comps"]["minimum"] == 1
