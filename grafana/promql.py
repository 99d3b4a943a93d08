"""Expressions of PromQL over the sidecar's own metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """A choice of series, the labels that every sum keeps (`by`), and the window of rates.

    Label matchers are keyword arguments: `source="cached"`, `purpose="~client|plant"` for a regular
    expression, `outcome="!~ok|lost"` for its negation.
    """

    matchers: str
    by: tuple[str, ...]
    window: str

    def series(self, metric: str, **labels: str) -> str:
        matchers = ",".join([*filter(None, [self.matchers]), *map(_matcher, labels, labels.values())])
        return f"slotkeeper_{metric}{{{matchers}}}" if matchers else f"slotkeeper_{metric}"

    def total(self, metric: str, *by: str, **labels: str) -> str:
        """Return the sum of a gauge."""
        return self._sum(self.series(metric, **labels), *by)

    def rate(self, metric: str, *by: str, **labels: str) -> str:
        """Return the rate of a counter per second."""
        return self._sum(f"rate({self.series(metric, **labels)}[{self.window}])", *by)

    def increase(self, metric: str, *by: str, **labels: str) -> str:
        """Return the increase of a counter over the window."""
        return self._sum(f"increase({self.series(metric, **labels)}[{self.window}])", *by)

    def quantile(self, part: float, histogram: str, *by: str) -> str:
        return f"histogram_quantile({part}, {self.rate(f'{histogram}_bucket', 'le', *by)})"

    def quantiles(self, histogram: str, *parts: float) -> dict[str, str]:
        """Return several quantiles by name, such as p95."""
        return {f"p{part * 100:.0f}": self.quantile(part, histogram) for part in parts}

    def _sum(self, of: str, *by: str) -> str:
        named = ", ".join((*self.by, *by))
        return f"sum by ({named}) ({of})" if named else f"sum({of})"


def ratio(one: str, other: str) -> str:
    """Return `one / other`, with no value where `other` is 0: Prometheus would compare NaN as a number."""
    return f"{one} / ({other} > 0)"


def _matcher(label: str, value: str) -> str:
    for sign in ("!~", "~"):
        if value.startswith(sign):
            return f'{label}{sign if sign == "!~" else "=~"}"{value.removeprefix(sign)}"'
    return f'{label}="{value}"'


# The series that the dashboard's variables select: at each moment, and over the whole time range.
NOW: Final = Scope(matchers='job=~"$job",instance=~"$instance"', by=(), window="$__rate_interval")
ALL: Final = replace(NOW, window="$__range")

# Definitions: docs/reference.md, "Figures". A client waits for the prefill of its own request, and for plants
# that the sidecar ran before it.
WAITED: Final = "~client|plant"
TOTAL: Final = "~client|plant|idle"  # for prefill amplification; excludes probes of an engine
WRONG_TOKENS: Final = "64.0"  # a prediction is wrong if it is off by more; the sidecar then reads GET /slots


def computed_per_oracle(scope: Scope, purpose: str = WAITED) -> str:
    """Return the waited ratio, or with `TOTAL` the total.

    1 is a perfect cache. Idle work and rules can bring it below 1. Requests whose oracle is unknown are left
    out. Idle work belongs to no request, so the total says nothing about a short time: use an hour or more.
    """
    return ratio(f"({_weighed(scope, purpose)})", scope.rate("oracle_tokens_total"))


def beyond_oracle(scope: Scope) -> str:
    """Return the waited ratio without tokens that the client itself wanted computed: a bypass is no fault."""
    bypassed = scope.rate("lost_tokens_total", reason="bypassed")
    return ratio(f"({_weighed(scope, WAITED)} - {bypassed})", scope.rate("oracle_tokens_total"))


def _weighed(scope: Scope, purpose: str) -> str:
    """Return the computed tokens per second, without those for requests whose oracle is unknown."""
    return f"{scope.rate('prefill_tokens_total', purpose=purpose)} - {scope.rate('unknown_tokens_total')}"


def computed_again(scope: Scope) -> str:
    """Return the tokens per second that were computed again: lost by the cache, or by a client's change."""
    lost = scope.rate("lost_tokens_total", reason="!~bypassed")
    return f"{scope.rate('repeated_tokens_total')} + {lost}"


def saved_seconds(scope: Scope) -> str:
    """Return the saved seconds; negative if restores, touches and steers took longer than computing."""
    gross, steps = (scope.increase(name) for name in ("prefill_saved_seconds_total", "step_seconds_total"))
    return f"{gross} - {steps}"


def hit_ratio(scope: Scope) -> str:
    """Return reused prompt tokens divided by all prompt tokens."""
    return ratio(scope.rate("prompt_tokens_total", source="cached"), scope.rate("prompt_tokens_total"))


def wrong_count(scope: Scope) -> str:
    """Return how many predictions were wrong."""
    error = "prediction_error_tokens"
    return f"{scope.increase(f'{error}_count')} - {scope.increase(f'{error}_bucket', le=WRONG_TOKENS)}"


def wrong_predictions(scope: Scope) -> str:
    """Return the share of predictions that were wrong."""
    error = "prediction_error_tokens"
    return f"1 - {ratio(scope.rate(f'{error}_bucket', le=WRONG_TOKENS), scope.rate(f'{error}_count'))}"
