"""Completes ``prefect deployment run FLOW`` to ``prefect deployment run FLOW/DEPLOYMENT``.

A plugin of Prefect, whose command line knows deployments by flow and own name only. Prefect
calls it where ``[plugins] enabled = true`` stands in the prefect.toml of the current folder,
before the command line is read. Other commands, and programs that only import Prefect, are left
as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from prefect.plugins import HookContext, register_hook

_COMMANDS = ("deployment", "deployments")
_PROFILE = ("-p", "--profile")
_TAKE_NO_VALUE = ("--watch", "--no-watch", "--prompt", "--no-prompt")
_NAMED_OTHERWISE = ("--id", "--name", "--help")


@register_hook
async def setup_environment(*, ctx: HookContext) -> None:  # noqa: ARG001
    """Complete the name of the deployment in ``sys.argv``, where a flow's stands.

    Raises
    ------
    SystemExit
        The flow has no deployment, or several, or no server answers.
    """
    if not _is_prefect(sys.argv[0]):
        return
    place = bare_name(sys.argv)
    if place is None:
        return
    try:
        sys.argv[place] = await _complete(sys.argv[place], _profile(sys.argv[1:place]))
    except LookupError as error:
        print(error.args[0], file=sys.stderr)
        raise SystemExit(1) from None


def bare_name(arguments: Sequence[str]) -> int | None:
    """Where a flow's bare name stands in a command line ``prefect deployment run NAME``.

    Parameters
    ----------
    arguments
        The program and its arguments.

    Returns
    -------
    Index, or None where another command is given, no name, or a full one.
    """
    words = _words(arguments)
    if next(words, (0, ""))[1] not in _COMMANDS or next(words, (0, ""))[1] != "run":
        return None
    if any(option.partition("=")[0] in _NAMED_OTHERWISE for option in arguments):
        return None
    place, name = next(words, (0, ""))
    return place if name and "/" not in name else None


def choose(flow: str, found: Sequence[str], others: Sequence[str], server: str) -> str:
    """Return the only deployment of a flow.

    Parameters
    ----------
    flow
        Name of the flow.
    found, others
        Full names of its deployments, and of those of all flows.
    server
        Address of the server, for messages.

    Raises
    ------
    LookupError
        There is none, or there are several.
    """
    if len(found) == 1:
        return found[0]
    if found:
        commands = "\n".join(f"  prefect deployment run {name}" for name in sorted(found))
        msg = f"Flow {flow!r} has {len(found)} deployments; say which:\n{commands}"
    elif others:
        names = "\n".join(f"  {name}" for name in sorted(others))
        msg = f"No deployment of a flow {flow!r} on {server}. There are:\n{names}"
    else:
        msg = (
            f"Nothing is deployed on {server}. Deploy the flows with `make deploy`, in the "
            "folder of the repository; deployments/README.md has the steps."
        )
    raise LookupError(msg)


def _words(arguments: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Places and texts of the arguments that are neither options nor their values."""
    value = True  # the program
    for place, text in enumerate(arguments):
        if value:
            value = False
        elif text.startswith("-"):
            value = "=" not in text and text not in _TAKE_NO_VALUE
        else:
            yield place, text


def _is_prefect(program: str) -> bool:
    # Python puts "-m" there while it imports the package that it is going to run.
    if program == "-m":
        return sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] == ["prefect"]
    return Path(program).name == "prefect"


def _profile(options: Sequence[str]) -> str | None:
    for option, value in zip(options, [*options[1:], ""], strict=True):
        if option in _PROFILE:
            return value
        if option.startswith("--profile="):
            return option.partition("=")[2]
    return None


async def _complete(flow: str, profile: str | None) -> str:
    from httpx import HTTPError
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName
    from prefect.context import use_profile

    chosen: AbstractContextManager[Any] = nullcontext()
    if profile is not None:
        chosen = use_profile(profile, override_environment_variables=True)
    with chosen:
        try:
            async with get_client() as client:
                server = str(client.api_url)
                own = FlowFilter(name=FlowFilterName(any_=[flow]))
                deployments = await client.read_deployments(flow_filter=own)
                found = [f"{flow}/{deployment.name}" for deployment in deployments]
                others = [] if found else await _all_deployments(client)
        except (HTTPError, RuntimeError) as error:
            msg = (
                f"Cannot look up the deployment of flow {flow!r}: {error}\nStart the Prefect "
                "server or correct PREFECT_API_URL. With FLOW/DEPLOYMENT nothing is looked up."
            )
            raise LookupError(msg) from error
    return choose(flow, found, others, server)


async def _all_deployments(client: Any) -> list[str]:
    flows = {flow.id: flow.name for flow in await client.read_flows()}
    return [f"{flows.get(d.flow_id, '?')}/{d.name}" for d in await client.read_deployments()]
