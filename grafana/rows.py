"""The rows of the dashboard. Every description says what a good value is."""

from __future__ import annotations

from typing import Final

from grafana.panels import COLUMNS, Panel, density, lines, number
from grafana.promql import (
    ALL,
    NOW,
    TOTAL,
    computed_per_oracle,
    hit_ratio,
    ratio,
    saved_seconds,
    wrong_predictions,
)

TOKENS: Final = "suffix: tok/s"
HALF: Final = COLUMNS // 2
HIGH: Final = ((None, "red"), (0.5, "orange"), (0.8, "green"))  # the higher, the better
LOW: Final = ((None, "green"), (1.1, "orange"), (1.3, "red"))


def headline() -> list[Panel]:
    return [
        number(
            "Waited",
            "Tokens that clients waited for, by those that a perfect cache would have computed (the oracle). "
            "Good is 1.0 to 1.1; less means that idle work or a rule has saved more.",
            {"": computed_per_oracle(ALL)},
            steps=LOW,
            decimals=2,
        ),
        number(
            "Total",
            "The same with what was computed while nobody waited: prefill amplification. Good is below 1.2.",
            {"": computed_per_oracle(ALL, TOTAL)},
            steps=LOW,
            decimals=2,
        ),
        number(
            "Hit rate",
            "Prompt tokens that were reused: earlier work had left them. Good is 90 % and more with agents; "
            "new prompts have none, so look at waited first.",
            {"": hit_ratio(ALL)},
            unit="percentunit",
            steps=HIGH,
            decimals=1,
        ),
        number(
            "Prefill time saved",
            "What computing the reused tokens would have taken, at the engine's own rate, less the time of "
            "restores, touches and steers. Good is hours; less than 0 means that these cost more.",
            {"": saved_seconds(ALL)},
            unit="s",
        ),
        number(
            "Engines",
            "Good is as many up as there are.",
            {"up": NOW.total("engine_up"), "of": f"count({NOW.series('engine_up')})"},
        ),
        number(
            "Requests",
            "Answered in this time. Good is what you expect: 0 means that nobody asks here.",
            {"": ALL.increase("requests_total")},
            decimals=0,
        ),
        number(
            "Sidecars",
            "By version. Good is one version everywhere.",
            {"{{version}}": f"count by (version) ({NOW.series('build_info')})"},
        ),
    ]


def tokens() -> list[Panel]:
    return [
        lines(
            "Prompt tokens",
            "By the engine's count. Good is a computed line close to the oracle's.",
            {
                "reused": NOW.rate("prompt_tokens_total", source="cached"),
                "computed": NOW.rate("prompt_tokens_total", source="computed"),
                "prepared: reused, and computed in idle time": NOW.rate("prepared_tokens_total"),
                "idle": NOW.rate("prefill_tokens_total", purpose="idle"),
                "oracle": NOW.rate("oracle_tokens_total"),
            },
            unit=TOKENS,
            exemplars=True,
        ),
        lines(
            "Waited and total, over time",
            "Good is 1.0 to 1.1 where clients waited. With idle work it may be more: nobody waits then.",
            {
                "waited": computed_per_oracle(NOW),
                "total": computed_per_oracle(NOW, TOTAL),
            },
            limit=1.3,
        ),
        lines(
            "Prefill, by who wanted it",
            "Good is few plants beside what clients compute. Idle work yields to any request.",
            {"{{purpose}}": NOW.rate("prefill_tokens_total", "purpose")},
            unit=TOKENS,
            stacked=True,
        ),
        lines(
            "Lost, by why the cache did not have them",
            "Tokens computed that an engine had computed before. Good is nothing but bypassed.",
            {"{{reason}}": NOW.rate("lost_tokens_total", "reason")},
            unit=TOKENS,
            width=HALF,
            stacked=True,
            exemplars=True,
        ),
        lines(
            "Computed again, by what the client had changed",
            "Good is nothing. `slotkeeper why --repeated` lists them, docs/rules.md helps.",
            {"{{cause}}": f"{NOW.rate('repeated_tokens_total', 'cause')} > 0"},
            unit=TOKENS,
            width=HALF,
            stacked=True,
        ),
    ]


def models() -> list[Panel]:
    return [
        lines(
            "Tokens, by model of a router",
            "Computed beside the oracle. Good is close together, also where models are swapped.",
            {"{{model}}, {{source}}": NOW.rate("model_prompt_tokens_total", "model", "source")},
            unit=TOKENS,
            width=HALF,
        ),
        lines(
            "Models loaded",
            "How often, and how long it took. Good is seldom: models that take turns cost a load each time.",
            {
                "{{model}}, {{outcome}}": NOW.increase("model_loads_total", "model", "outcome"),
                "seconds": ratio(NOW.rate("model_load_seconds_sum"), NOW.rate("model_load_seconds_count")),
            },
            width=HALF,
        ),
    ]


def latency() -> list[Panel]:
    histogram = "time_to_first_token_seconds"
    return [
        density(
            "Time to first token",
            "Good is a dark band that does not rise as conversations grow.",
            NOW.increase(f"{histogram}_bucket", "le"),
            unit="s",
        ),
        lines(
            "Time to first token, quantiles",
            "Good is a median well below a second, however long the conversations are.",
            NOW.quantiles(histogram, 0.5, 0.95, 0.99),
            unit="s",
            width=HALF,
            exemplars=True,
        ),
        lines(
            "Waiting for a slot",
            "Good is close to 0. If it rises, there are more conversations at once than slots.",
            NOW.quantiles("queue_wait_seconds", 0.5, 0.95),
            unit="s",
            width=HALF,
            exemplars=True,
        ),
        lines(
            "The sidecar's own time, by stage",
            "95 of 100 requests took less. Good is a few milliseconds.",
            {"{{stage}}": NOW.quantile(0.95, "overhead_seconds", "stage")},
            unit="s",
            width=HALF,
        ),
    ]


def slots() -> list[Panel]:
    return [
        lines(
            "Slots, by state",
            "Good is at least one idle most of the time. `foreign` is at work for somebody who goes past us.",
            {"{{state}}": NOW.total("slots", "state")},
            stacked=True,
        ),
        lines("Queued requests", "Good is 0 most of the time.", {"waiting": NOW.total("queued_requests")}),
        lines(
            "Wait in the queue, by priority",
            "The 95th percentile. Good is that high and normal wait for less than one batch of the engine.",
            {"{{priority}}": NOW.quantile(0.95, "priority_wait_seconds", "priority")},
            unit="s",
        ),
        lines(
            "Priorities and deadlines",
            "Requests that went first, stood back, gave way to others after a batch or kept on; aged ones, "
            "which none of their priority had gone before for a minute; and those refused because they could "
            "not begin in time (expired). Good is no aged and no expired.",
            {"{{reason}}": NOW.increase("priority_total", "reason")},
        ),
        lines(
            "Flags found out",
            "Of engines that others started, by what they did. Good is none once an engine has worked.",
            {"{{flag}}, {{how}}": NOW.increase("engine_flags_learned_total", "flag", "how")},
        ),
        lines(
            "Decisions",
            "Where requests went, and why. Good is continues, prefix, ram_cache and snapshot; cold only for "
            "what is new.",
            {"{{reason}}": f"{NOW.rate('decisions_total', 'reason')} > 0"},
            unit="reqps",
            stacked=True,
        ),
    ]


def snapshots() -> list[Panel]:
    quarter = COLUMNS // 4
    return [
        lines(
            "Snapshots",
            "Slots in files. Good is a few for each conversation that may go on.",
            {"snapshots": NOW.total("snapshots")},
            width=quarter,
        ),
        lines(
            "Bytes, by tier",
            "Good is below the budgets, `--hot-bytes` and `--cold-bytes`.",
            {"{{tier}}": NOW.total("snapshot_bytes", "tier")},
            unit="bytes",
            width=quarter,
            stacked=True,
        ),
        lines(
            "Operations",
            "In an hour, by outcome. Good is nothing but ok; of a shared store also nothing, and leased.",
            {"{{op}} {{outcome}}": f"{NOW.rate('snapshot_operations_total', 'op', 'outcome')} * 3600 > 0"},
            unit="suffix: /h",
            width=quarter,
        ),
        lines(
            "Seconds, by operation",
            "95 of 100 took less. Good is a restore that takes less than computing the tokens would.",
            {"{{op}}": NOW.quantile(0.95, "snapshot_seconds", "op")},
            unit="s",
            width=quarter,
        ),
    ]


def rules() -> list[Panel]:
    return [
        lines(
            "Requests in which a rule found something",
            "Each is a client that changed its own past. Good is fixed, not observed; see docs/rules.md.",
            {"{{rule}}, {{action}}": f"{NOW.rate('rewrites_total', 'rule', 'action')} > 0"},
            unit="reqps",
            width=COLUMNS,
            stacked=True,
        )
    ]


def trouble() -> list[Panel]:
    return [
        lines(
            "Requests, by outcome",
            "Good is ok, and client_gone where users press stop.",
            {"{{outcome}}": NOW.rate("requests_total", "outcome")},
            unit="reqps",
            width=COLUMNS // 4,
            stacked=True,
        ),
        lines(
            "Fallbacks, by what failed",
            "Requests that went through as they came, and log lines that could not be written. Good is 0.",
            {
                "{{reason}}": NOW.increase("fallbacks_total", "reason"),
                "log lines": NOW.increase("log_lines_dropped_total"),
            },
            width=COLUMNS // 4,
        ),
        lines(
            "Prediction error",
            "How many tokens the engine's reuse was off. Good is below 1; up to 64 does no harm.",
            NOW.quantiles("prediction_error_tokens", 0.5, 0.95),
            unit="suffix: tok",
            width=COLUMNS // 4,
            exemplars=True,
        ),
        lines(
            "Wrong predictions, inexact prompts",
            "Shares of the predictions that were off by more than 64 tokens, and of the prompts whose length "
            "we had counted wrongly. Good is 0 for both.",
            {
                "predictions": wrong_predictions(NOW),
                "prompts": ratio(NOW.rate("inexact_prompts_total"), NOW.rate("requests_total")),
            },
            unit="percentunit",
            width=COLUMNS // 4,
            limit=0.05,
        ),
        lines(
            "Refused, cut off, sent again",
            "Requests that the engine might read otherwise, requests beyond a limit, closed connections, "
            "requests whose engine ended before their answer began, engines that froze, a shared store "
            "or its hints lost, and slots that held other tokens than they should. Good is 0.",
            {
                "refused: {{reason}}": NOW.increase("refused_requests_total", "reason"),
                "too many: {{reason}}": NOW.increase("crowded_requests_total", "reason"),
                "closed: {{reason}}": NOW.increase("connections_cut_total", "reason"),
                "sent again": NOW.increase("requests_sent_again_total"),
                "frozen: {{engine}}": NOW.increase("engine_freezes_total", "engine"),
                "lost: shared {{part}}": NOW.increase("shared_losses_total", "part"),
                "down: shared {{part}}": f"1 - min by (part) ({NOW.series('shared_up')})",
                "poisoned: {{reason}}": NOW.increase("poisoned_slots_total", "reason"),
            },
            width=COLUMNS,
        ),
        lines(
            "Shared KV buffer",
            "Where all slots of an engine share one: requests that waited for cells, idle slots that were "
            "emptied for them, with a copy (parked) or without (erased), what the engine emptied itself, and "
            "requests that it failed. Good is no failed and no retried.",
            {"{{reason}}": NOW.increase("kv_pool_total", "reason")},
            width=COLUMNS,
        ),
    ]
