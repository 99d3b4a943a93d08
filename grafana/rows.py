"""Rows of the dashboard. Every description says what a good value is."""

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
            "Tokens that clients waited for, divided by those that a perfect cache would have computed (the "
            "oracle). Good is 1.0 to 1.1; less means that idle work or a rule has saved more.",
            {"": computed_per_oracle(ALL)},
            steps=LOW,
            decimals=2,
        ),
        number(
            "Total",
            "Prefill amplification: as Waited, but with the tokens computed in idle time. Good is below 1.2.",
            {"": computed_per_oracle(ALL, TOTAL)},
            steps=LOW,
            decimals=2,
        ),
        number(
            "Hit rate",
            "Share of the prompt tokens that were reused from earlier work. Good is 90 % and more with "
            "agents. New prompts reuse nothing, so look at Waited first.",
            {"": hit_ratio(ALL)},
            unit="percentunit",
            steps=HIGH,
            decimals=1,
        ),
        number(
            "Prefill time saved",
            "Time that computing the reused tokens would have taken at the engine's prefill rate, less the "
            "time of restores, touches and steers. Good is hours; below 0 these steps cost more than they "
            "saved.",
            {"": saved_seconds(ALL)},
            unit="s",
        ),
        number(
            "Engines",
            "Engines that answer, of all engines. Good is all of them.",
            {"up": NOW.total("engine_up"), "of": f"count({NOW.series('engine_up')})"},
        ),
        number(
            "Requests",
            "Requests answered in the time range. Good is what you expect; 0 means that no client uses this "
            "sidecar.",
            {"": ALL.increase("requests_total")},
            decimals=0,
        ),
        number(
            "Sidecars",
            "Sidecars by version. Good is one version everywhere.",
            {"{{version}}": f"count by (version) ({NOW.series('build_info')})"},
        ),
    ]


def tokens() -> list[Panel]:
    return [
        lines(
            "Prompt tokens",
            "Prompt tokens per second, by the engine's count. Good is a computed line close to the oracle's.",
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
            "Good is 1.0 to 1.1 for waited. The total may be higher: no client waits for idle work.",
            {
                "waited": computed_per_oracle(NOW),
                "total, over the whole time range before": computed_per_oracle(ALL, TOTAL),
            },
            limit=1.3,
        ),
        lines(
            "Prefill, by purpose",
            "Tokens computed per second. Good is few for `plant` beside `client`. Idle work yields to any "
            "request.",
            {"{{purpose}}": NOW.rate("prefill_tokens_total", "purpose")},
            unit=TOKENS,
            stacked=True,
        ),
        lines(
            "Lost tokens, by reason",
            "Tokens computed although an engine had computed them before, by the reason why no cache had "
            "them. Good is only bypassed.",
            {"{{reason}}": NOW.rate("lost_tokens_total", "reason")},
            unit=TOKENS,
            width=HALF,
            stacked=True,
            exemplars=True,
        ),
        lines(
            "Tokens computed again, by change of the client",
            "Tokens computed again because the client changed earlier parts of its conversation. Good is 0. "
            "`slotkeeper why --repeated` lists the requests, docs/rules.md helps.",
            {"{{cause}}": f"{NOW.rate('repeated_tokens_total', 'cause')} > 0"},
            unit=TOKENS,
            width=HALF,
            stacked=True,
        ),
        lines(
            "Requests in no ratio, by reason",
            "What a perfect cache would have computed for these is unknown: waited and total leave them out. "
            "Good is 0. `no_slots`: start the engine with --slots. `no_key`: it refuses our key.",
            {"{{reason}}": NOW.increase("unknown_requests_total", "reason")},
            width=COLUMNS,
            stacked=True,
        ),
    ]


def models() -> list[Panel]:
    return [
        lines(
            "Tokens, by model of a router",
            "Computed tokens beside the oracle. Good is lines close together, also where models are swapped.",
            {"{{model}}, {{source}}": NOW.rate("model_prompt_tokens_total", "model", "source")},
            unit=TOKENS,
            width=HALF,
        ),
        lines(
            "Models loaded",
            "Number of loads, and seconds of one. Good is few: models that alternate cost a load at each "
            "swap.",
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
            "Time of requests, by stage",
            "Seconds that requests spent in each stage, for each second in which they ended. Good is that "
            "most is `answer`. `engine` waits for an engine, `swap` for a model, `queue` for a slot.",
            {"{{stage}}": NOW.rate("stage_seconds_sum", "stage")},
            unit="s",
            width=COLUMNS,
            stacked=True,
        ),
        lines(
            "Waiting, beside the least",
            "Seconds that requests waited for their first token, and the least that any cache allows: the "
            "oracle's tokens in one pass, at the engine's own speed. Good is lines close together; idle work "
            "can bring the waits below the least.",
            {
                "waited": NOW.rate("compared_wait_seconds_total"),
                "least": NOW.rate("least_wait_seconds_total"),
            },
            unit="s",
            width=COLUMNS,
        ),
        lines(
            "Longest stall of an answer, quantiles",
            "The longest time between two tokens of each streamed answer. Good is close to the time of one "
            "token: it rises when the engine computes other prompts meanwhile, or writes and reads files.",
            NOW.quantiles("answer_stall_seconds", 0.5, 0.95),
            unit="s",
            width=COLUMNS // 3,
            exemplars=True,
        ),
        lines(
            "Waiting for a slot",
            "Good is close to 0. If it rises, there are more conversations at once than slots.",
            NOW.quantiles("queue_wait_seconds", 0.5, 0.95),
            unit="s",
            width=COLUMNS // 3,
            exemplars=True,
        ),
        lines(
            "The sidecar's own time, by stage",
            "95th percentile of each stage. Good is a few milliseconds.",
            {"{{stage}}": NOW.quantile(0.95, "overhead_seconds", "stage")},
            unit="s",
            width=COLUMNS // 3,
        ),
    ]


def slots() -> list[Panel]:
    return [
        lines(
            "Slots, by state",
            "Good is at least one idle most of the time. A `foreign` slot runs a task that another program "
            "sent to the engine, past the sidecar.",
            {"{{state}}": NOW.total("slots", "state")},
            stacked=True,
        ),
        lines(
            "Engines, by state",
            "Good is up, and `unloaded` or `sleeping` if that is intended. `failing`: the engine answers, "
            "but its requests fail and go to other engines. `draining` or `drained`: an operator took it "
            "out of use.",
            {"{{engine}} {{state}}": f"{NOW.total('engine_state', 'engine', 'state')} > 0"},
            stacked=True,
        ),
        lines(
            "Engines that fail",
            "Requests that failed by an engine's fault, and engines that were lost: they ended, froze, slept "
            "or were unloaded. Good is 0, but for sleep and for models that take turns.",
            {
                "failed: {{engine}}": NOW.increase("engine_failures_total", "engine"),
                "lost: {{engine}}": NOW.increase("engine_losses_total", "engine"),
            },
        ),
        lines("Queued requests", "Good is 0 most of the time.", {"waiting": NOW.total("queued_requests")}),
        lines(
            "Wait in the queue, by priority",
            "The 95th percentile. Good is that high and normal wait for less than one batch of the engine.",
            {"{{priority}}": NOW.quantile(0.95, "priority_wait_seconds", "priority")},
            unit="s",
        ),
        lines(
            "Priorities, deadlines, turns",
            "Requests that went first, stood back, gave way to others after a batch or kept on; aged ones, "
            "which none of their priority had gone before for a minute; and those refused because they could "
            "not begin in time (expired). Among equals: cheaper ones that went first, and slots kept for "
            "agents about to return. Good is no aged and no expired.",
            {"{{reason}}": NOW.increase("priority_total", "reason")},
        ),
        lines(
            "Flags found out",
            "Flags of engines that were not started by the sidecar, and how they were found out: by what the "
            "engine did. Good is 0 after an engine's first requests.",
            {"{{flag}}, {{how}}": NOW.increase("engine_flags_learned_total", "flag", "how")},
        ),
        lines(
            "Decisions",
            "Decisions on requests, by reason. Good is continues, prefix, ram_cache and snapshot; cold only "
            "for new prompts.",
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
            "Slots saved to files. Good is a few for each conversation that may continue.",
            {"snapshots": NOW.total("snapshots")},
            width=quarter,
        ),
        lines(
            "Bytes, by tier",
            "Size of the files, and the budgets (`--hot-bytes` and `--cold-bytes`, or what follows from the "
            "disk). Good is below the budgets.",
            {
                "{{tier}}": NOW.total("snapshot_bytes", "tier"),
                "budget, {{tier}}": NOW.total("snapshot_budget_bytes", "tier"),
            },
            unit="bytes",
            width=quarter,
        ),
        lines(
            "Operations",
            "Operations per hour, by outcome. Good is only ok; with a shared store also `nothing` and "
            "`leased`.",
            {"{{op}} {{outcome}}": f"{NOW.rate('snapshot_operations_total', 'op', 'outcome')} * 3600 > 0"},
            unit="suffix: /h",
            width=quarter,
        ),
        lines(
            "Seconds, by operation",
            "95th percentile of each operation. Good is a restore that takes less than computing its tokens.",
            {"{{op}}": NOW.quantile(0.95, "snapshot_seconds", "op")},
            unit="s",
            width=quarter,
        ),
    ]


def rules() -> list[Panel]:
    return [
        lines(
            "Requests in which a rule found something",
            "In each of these a client changed earlier parts of its conversation. Good is fixed, not "
            "observed; see docs/rules.md.",
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
            "Requests that were sent on unchanged because a part of the sidecar failed, and log lines that "
            "could not be written. Good is 0.",
            {
                "{{reason}}": NOW.increase("fallbacks_total", "reason"),
                "log lines": NOW.increase("log_lines_dropped_total"),
            },
            width=COLUMNS // 4,
        ),
        lines(
            "Prediction error",
            "Difference between the predicted and the actual reuse, in tokens. Good is below 1; up to 64 "
            "does no harm.",
            NOW.quantiles("prediction_error_tokens", 0.5, 0.95),
            unit="suffix: tok",
            width=COLUMNS // 4,
            exemplars=True,
        ),
        lines(
            "Wrong predictions, inexact prompts",
            "Share of the predictions that were off by more than 64 tokens, and share of the prompts whose "
            "length the sidecar counted wrongly. Good is 0 for both.",
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
            "Requests refused because the engine might read them differently, requests beyond a limit, "
            "closed connections, requests sent again because their engine ended before the answer began, "
            "engines that froze, losses of the shared store or its hints, and slots with wrong contents. "
            "Good is 0.",
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
            "For engines whose slots share one buffer: requests that waited for cells, idle slots that were "
            "emptied for them with a copy (parked) or without (erased), slots that the engine emptied "
            "itself, and requests that the engine failed. Good is no failed and no retried.",
            {"{{reason}}": NOW.increase("kv_pool_total", "reason")},
            width=COLUMNS,
        ),
    ]
