"""What a flow's parameter may be, for the form in Prefect's pages and the server's check.

Given as ``Annotated[str, OneOf("auto", "cpu")]``. The flow itself still gets what it is given,
and says what is wrong with it in its own words and in the run's record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _SchemaKeywords:
    """Keywords that pydantic adds to the parameter's JSON schema."""

    def __init__(self, **keywords: Any) -> None:
        self._keywords = keywords

    def __get_pydantic_json_schema__(
        self, core: Any, handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        return handler(core) | self._keywords


class OneOf(_SchemaKeywords):
    """One of these values; the form shows them as a list.

    Parameters
    ----------
    *values
        The values.
    """

    def __init__(self, *values: Any) -> None:
        super().__init__(enum=list(values))


class AtLeast(_SchemaKeywords):
    """A number no less than this.

    Parameters
    ----------
    value
        The least.
    """

    def __init__(self, value: float) -> None:
        super().__init__(minimum=value)
