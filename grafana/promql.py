"""Expressions of PromQL over the sidecar's own metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which series are meant, what is never summed away, and over what time a rate is taken.

    A matcher is a keyword: `source="cached"`, `purpose="~client|plant"` for a pattern, and
    `outcome="!~ok|lost"` for what does not match one.
    """

    matchers: str
    by: tuple[str, ...]
    window: str

    def series(self, metric: str, **labels: str) -> str:
        matchers = ",".join([*filter(None, [self.matchers]), *map(_matcher, labels, labels.values())])
        return f"slotkeeper_{metric}{{{matchers}}}" if matchers else f"slotkeeper_{metric}"

    def total(self, metric: str, *by: str, **labels: str) -> str:
        """Of a gauge."""
        return self._sum(self.series(metric, **labels), *by)

    def rate(self, metric: str, *by: str, **labels: str) -> str:
        """Of a counter, for a second."""
        return self._sum(f"rate({self.series(metric, **labels)}[{self.window}])", *by)

    def increase(self, metric: str, *by: str, **labels: str) -> str:
        """Of a counter, over the window."""
        return self._sum(f"increase({self.series(metric, **labels)}[{self.window}])", *by)

    def quantile(self, part: float, histogram: str, *by: str) -> str:
        return f"histogram_quantile({part}, {self.rate(f'{histogram}_bucket', 'le', *by)})"

    def quantiles(self, histogram: str, *parts: float) -> dict[str, str]:
        """By name, as p95."""
        return {f"p{part * 100:.0f}": self.quantile(part, histogram) for part in parts}

    def _sum(self, of: str, *by: str) -> str:
        named = ", ".join((*self.by, *by))
        return f"sum by ({named}) ({of})" if named else f"sum({of})"


def ratio(one: str, other: str) -> str:
    """Nothing where nothing happened: 0/0 would be drawn, and compared, as a number that it is not."""
    return f"{one} / ({other} > 0)"


def _matcher(label: str, value: str) -> str:
    for sign in ("!~", "~"):
        if value.startswith(sign):
            return f'{label}{sign if sign == "!~" else "=~"}"{value.removeprefix(sign)}"'
    return f'{label}="{value}"'


# What is chosen on the dashboard: at each moment, and in the whole time that is shown.
NOW: Final = Scope(matchers='job=~"$job",instance=~"$instance"', by=(), window="$__rate_interval")
ALL: Final = replace(NOW, window="$__range")

# The definitions are those of docs/reference.md, "Figures". What a client waited for is its own request, and
# what we prefilled for it before.
WAITED: Final = "~client|plant"
TOTAL: Final = "~client|plant|idle"  # prefill amplification; without what is computed to know an engine
WRONG_TOKENS: Final = "64.0"  # a prediction that is off by more is wrong: we look at the slots again


def computed_per_oracle(scope: Scope, purpose: str = WAITED) -> str:
    """Waited, or with `TOTAL` the total. 1 is a perfect cache; less is what idle work or a rule has saved."""
    return ratio(scope.rate("prefill_tokens_total", purpose=purpose), scope.rate("oracle_tokens_total"))


def saved_seconds(scope: Scope) -> str:
    """Less than nothing where restores, touches and steers took longer than computing would have."""
    gross, steps = (scope.increase(name) for name in ("prefill_saved_seconds_total", "step_seconds_total"))
    return f"{gross} - {steps}"


def hit_ratio(scope: Scope) -> str:
    """Reused by prompt."""
    return ratio(scope.rate("prompt_tokens_total", source="cached"), scope.rate("prompt_tokens_total"))


def wrong_predictions(scope: Scope) -> str:
    """The share of all predictions."""
    error = "prediction_error_tokens"
    return f"1 - {ratio(scope.rate(f'{error}_bucket', le=WRONG_TOKENS), scope.rate(f'{error}_count'))}"
