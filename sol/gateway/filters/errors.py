"""What filters refuse with."""

from __future__ import annotations

from sol.errors import RequestError
from sol.gateway.errors import NoCapacityError


class ContentFilteredError(RequestError):
    """A rule objects to what the request says. `param` is where."""

    code = "content_filter"


class FilterFailedError(NoCapacityError):
    """A rule could not look at a text, and its `on_error` is to let nothing pass unseen."""

    code = "filter_failed"
