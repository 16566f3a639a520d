"""Cases of the chart's alerts: series, a time, and the alerts that fire then."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import yaml

from chart.charts import CHART
from ground.api import Object

FILE = CHART / "rules" / "rota.yaml"
GROUPS: list[Object] = yaml.safe_load(FILE.read_text())["groups"]
RULES: list[Object] = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = {(rule["alert"], rule["labels"]["severity"]): rule for rule in RULES if "alert" in rule}

ORDERS = {"namespace": "shop", "group": "orders"}
DAY = 86_400
FROM_A = 'namespace="shop", group="orders", instance="a"'


@dataclass(frozen=True)
class Fires:
    """A firing alert: its severity, its formatted value, and its labels."""

    severity: str
    value: str = ""
    labels: Mapping[str, str] = field(default_factory=lambda: ORDERS)

    def expected(self, name: str) -> Object:
        """Return the alert in promtool's format."""
        rule = ALERTS[name, self.severity]
        words = {key: self.fill(text) for key, text in rule["annotations"].items()}
        return {"exp_labels": {"severity": self.severity, **self.labels}, "exp_annotations": words}

    def fill(self, text: str) -> str:
        """Fill the placeholders of an annotation, as Prometheus does."""
        text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda match: self.labels.get(match[1], ""), text)
        return re.sub(r"\{\{ \$value \| \w+ \}\}", self.value, text)


@dataclass(frozen=True)
class Case:
    """Series (in promtool's notation, a value every 30 s; rules are evaluated every minute), and the firing alerts."""

    alert: str
    story: str
    series: Mapping[str, str]
    at: str
    fires: tuple[Fires, ...] = ()

    def __str__(self) -> str:
        return f"{self.alert}: {self.story}"

    def test(self) -> Object:
        """Return the case as a test of promtool."""
        expected = [firing.expected(self.alert) for firing in self.fires]
        return {
            "interval": "30s",
            "input_series": [{"series": name, "values": values} for name, values in self.series.items()],
            "alert_rule_test": [{"eval_time": self.at, "alertname": self.alert, "exp_alerts": expected}],
        }


def lag(values: str, topic: str = "orders", instance: str = "a") -> dict[str, str]:
    return {f'rota_group_lag{{namespace="shop", group="orders", topic="{topic}", instance="{instance}"}}': values}


def delay(values: str, topic: str = "orders") -> dict[str, str]:
    return {f'rota_group_delay_seconds{{{FROM_A}, topic="{topic}"}}': values}


def of_group(name: str, values: str, labels: str = "") -> dict[str, str]:
    return {f"rota_{name}{{{FROM_A}{labels}}}": values}


def condition(ready: int, degraded: int) -> dict[str, str]:
    return {
        **of_group("group_condition", f"{ready}x120", ', condition="Ready"'),
        **of_group("group_condition", f"{degraded}x120", ', condition="Degraded"'),
    }


def members(ready: int, foreign: int = 0, *, length: int = 240) -> dict[str, str]:
    return {
        **of_group("members", f"{ready}x{length}", ', state="Ready"'),
        **of_group("members", f"{foreign}x{length}", ', state="Foreign"'),
    }


def failing(ratio: str, problem: str) -> dict[str, str]:
    return of_group("delivery_failed_ratio", ratio) | of_group("group_problem", problem, ', reason="DeliveriesFailing"')


def certificate(days_left: float, lifetime_days: float, of: str = "group", instance: str = "a") -> dict[str, str]:
    """Return the times of a client certificate; the rules' clock starts at 0."""
    labels = f'namespace="shop", group="orders", instance="{instance}"'
    name = f"rota_{of}_client_certificate_{{}}_timestamp_seconds{{{{{labels}}}}}"
    expiration = days_left * DAY
    times = {"expiration": expiration, "not_before": expiration - lifetime_days * DAY}
    return {name.format(field): f"{time:.0f}x60" for field, time in times.items()}


def leader(values: str, pod: str = "rota-1") -> dict[str, str]:
    return {f'rota_leader{{namespace="rota-system", job="rota", pod="{pod}"}}': values}


def watch_age(values: str) -> dict[str, str]:
    return {'rota_watch_age_seconds{namespace="rota-system", job="rota", pod="rota-1", kind="pods"}': values}


def journal(values: str) -> dict[str, str]:
    return {'rota_journal_lost_total{namespace="rota-system", job="rota", pod="rota-1"}': values}


def last_success(values: str, lake: str = "s3://rota/fleet") -> dict[str, str]:
    labels = f'{{lake="{lake}", job="rota-pipeline", instance=""}}'
    return {f"rota_pipeline_last_success_timestamp_seconds{labels}": values}


def violations(kind: str, values: str) -> dict[str, str]:
    return {f'rota_pipeline_violations{{lake="s3://rota/fleet", kind="{kind}", job="rota-pipeline"}}': values}


def stored(failures: str, segments: str) -> dict[str, str]:
    labels = '{namespace="rota-system", job="rota", pod="rota-1"}'
    return {f"rota_journal_failures_total{labels}": failures, f"rota_journal_segments_total{labels}": segments}


QUEUES = of_group("queues", "8x240")
TOPIC = members(2) | of_group("group_lag_estimated", "0x240", ', topic="orders"')
TOPICS = TOPIC | of_group("group_lag_estimated", "1x240", ', topic="payments"')
OPERATOR = {"namespace": "rota-system", "job": "rota"}
CASES = [
    Case(
        "RotaLagGrowing", "it grows", lag("0+10x120"), "50m", (Fires("warning", "700", ORDERS | {"topic": "orders"}),)
    ),
    Case(
        "RotaLagGrowing",
        "it grows, and another operator leads meanwhile",
        lag("0+10x70 _x50") | lag("_x71 710+10x49", instance="b"),
        "50m",
        (Fires("warning", "700", ORDERS | {"topic": "orders"}),),
    ),
    Case("RotaLagGrowing", "it oscillates", lag("0 500 900 400 100 " * 24), "50m"),
    Case("RotaLagGrowing", "it has grown for a short time only", lag("0+10x120"), "20m"),
    Case("RotaLagGrowing", "many messages came at once", lag("0x50 100000-900x70"), "41m"),
    Case("RotaLagGrowing", "it grew, and shrinks again", lag("0+10x80 797-3x60"), "52m"),
    Case("RotaLagGrowing", "it is large and constant", lag("1000000x120"), "50m"),
    Case("RotaLagGrowing", "it is unknown", lag("0+10x20 _x100"), "50m"),
    Case(
        "RotaQueueStalled",
        "two of eight are stalled",
        QUEUES | of_group("queues_by_lag_state", "0x10 2x50", ', lag_state="Stalled"'),
        "15m",
        (Fires("critical", "25%"),),
    ),
    Case(
        "RotaQueueStalled",
        "one was stalled for a moment",
        QUEUES | of_group("queues_by_lag_state", "0x10 1x6 0x50", ', lag_state="Stalled"'),
        "8m",
    ),
    Case(
        "RotaQueueStalled",
        "all are slow",
        QUEUES | of_group("queues_by_lag_state", "8x60", ', lag_state="Slow"'),
        "15m",
    ),
    Case(
        "RotaLagUnknown",
        "brokers stopped responding",
        QUEUES | of_group("lag_age_seconds", "0+30x60"),
        "20m",
        (Fires("warning"),),
    ),
    Case("RotaLagUnknown", "brokers never responded", TOPIC, "15m", (Fires("warning"),)),
    Case("RotaLagUnknown", "the lag of one of two topics is unknown", TOPICS | lag("0x60"), "15m", (Fires("warning"),)),
    Case(
        "RotaLagUnknown",
        "one of several brokers never responded, and the group has no members",
        members(0) | of_group("lag_age_seconds", "0+30x60"),
        "20m",
        (Fires("warning"),),
    ),
    Case(
        "RotaLagUnknown",
        "one of two brokers does not respond",
        TOPIC | of_group("lag_age_seconds", "5x60") | lag("0x60", "%RETRY%orders"),
        "15m",
        (Fires("warning"),),
    ),
    Case("RotaLagUnknown", "the operator has just started", TOPIC, "5m"),
    Case(
        "RotaLagUnknown",
        "the lag of each topic is in the scrape of another operator",
        TOPICS | lag("0x60", instance="b") | lag("0x60", "payments") | of_group("lag_age_seconds", "5 15 " * 30),
        "20m",
    ),
    Case(
        "RotaLagUnknown",
        "only the lag of the retry topic is unknown",
        TOPIC | lag("0x60") | of_group("group_lag_estimated", "0x60", ', topic="%RETRY%orders"'),
        "20m",
    ),
    Case(
        "RotaLagUnknown",
        "it is a Broadcasting group without members",
        members(0) | of_group("group_lag_estimated", "1x60", ', topic="orders"'),
        "20m",
    ),
    Case("RotaDeadLettersGrowing", "they grow", of_group("dead_letters", "3+1x120"), "45m", (Fires("warning", "30"),)),
    Case("RotaDeadLettersGrowing", "one message became a dead letter", of_group("dead_letters", "3x20 4x100"), "20m"),
    Case("RotaDeadLettersGrowing", "there are many, and no new ones", of_group("dead_letters", "90000x120"), "45m"),
    Case(
        "RotaDelayBudgetBurning",
        "late for ten minutes",
        delay("2x240 90x24"),
        "131m",
        (Fires("critical", "18.33%"),),
    ),
    Case(
        "RotaDelayBudgetBurning",
        "late for an hour",
        delay("2x240 90x120"),
        "180m",
        (Fires("critical", "100%"), Fires("warning", "1.389%")),
    ),
    Case(
        "RotaDelayBudgetBurning",
        "late for a minute in every forty",
        delay("2x77 90x1 " * 45),
        "1799m",
        (Fires("warning", "1.042%"),),
    ),
    Case(
        "RotaDelayBudgetBurning",
        "late for a minute in every ten",
        delay("2x17 90x1 " * 24),
        "239m",
        (Fires("critical", "6.667%"),),
    ),
    Case("RotaDelayBudgetBurning", "it was often late, and is not any more", delay("2x17 90x1 " * 26 + "2x80"), "299m"),
    Case("RotaDelayBudgetBurning", "it was late in the morning", delay("90x100 2x760"), "420m"),
    Case("RotaDelayBudgetBurning", "it was late, and is not any more", delay("2x240 90x40 2x60"), "160m"),
    Case("RotaDelayBudgetBurning", "a new group starts with a backlog", delay("300x8 2x100"), "6m"),
    Case("RotaDelayBudgetBurning", "never late", delay("59x240"), "110m"),
    Case("RotaDelayBudgetBurning", "only messages of the retry topic wait", delay("900x240", "%RETRY%orders"), "110m"),
    Case(
        "RotaQueueUnowned",
        "two of eight have no owner",
        QUEUES | of_group("unowned_queues", "0x10 2x50"),
        "15m",
        (Fires("critical", "25%"),),
    ),
    Case("RotaQueueUnowned", "for a moment", QUEUES | of_group("unowned_queues", "0x10 8x6 0x50"), "8m"),
    Case(
        "RotaQueueUnowned",
        "unmanaged consumers are online, and four queues have no owner all the same",
        QUEUES | members(2, 2) | of_group("unowned_queues", "4x60"),
        "15m",
        (Fires("critical", "50%"),),
    ),
    Case(
        "RotaQueueUnowned",
        "unmanaged consumers were online, and may still be",
        QUEUES | of_group("members", "2x10 _x50", ', state="Foreign"') | of_group("unowned_queues", "0x10 4x50"),
        "15m",
    ),
    Case(
        "RotaGroupNotReady",
        "its topic is unknown",
        condition(0, 1) | of_group("group_problem", "1x120", ', reason="UnknownTopic"'),
        "15m",
        (Fires("critical"),),
    ),
    Case(
        "RotaGroupNotReady",
        "for a moment",
        condition(0, 1) | of_group("group_problem", "1x120", ', reason="UnknownTopic"'),
        "8m",
    ),
    Case("RotaGroupNotReady", "it has no problem", condition(0, 0), "15m"),
    Case(
        "RotaGroupNotReady",
        "unmanaged consumers own some queues",
        condition(0, 1)
        | of_group("group_problem", "1x120", ', reason="QueuesUnowned"')
        | of_group("group_problem", "1x120", ', reason="UnmanagedConsumers"'),
        "15m",
    ),
    Case("RotaGroupDegraded", "it is Ready and Degraded", condition(1, 1), "20m", (Fires("warning"),)),
    Case("RotaGroupDegraded", "for a moment", condition(1, 1), "10m"),
    Case("RotaGroupDegraded", "all is well", condition(1, 0), "20m"),
    Case("RotaGroupDegraded", "it is not Ready either", condition(0, 1), "20m"),
    Case(
        "RotaRebalanceStorm",
        "one in a minute",
        of_group("rebalances_total", "0+1x200", ', reason="MemberUnready", outcome="Settled"'),
        "60m",
        (Fires("warning", "30"),),
    ),
    Case(
        "RotaRebalanceStorm",
        "a rollout",
        of_group("rebalances_total", "0x20 0+1x30 30x150", ', reason="MemberLeft", outcome="Settled"'),
        "36m",
    ),
    Case(
        "RotaHandoverStuck",
        "one is in progress",
        of_group("handover_age_seconds", "0x10 0+30x60"),
        "15m",
        (Fires("warning", "9m 30s"),),
    ),
    Case("RotaHandoverStuck", "one took long and has ended", of_group("handover_age_seconds", "0+30x12 0x60"), "6m"),
    Case("RotaHandoverStuck", "one after another", of_group("handover_age_seconds", "0 30 60 90 120 " * 20), "15m"),
    Case("RotaUnmanagedConsumers", "a fleet is migrated", members(3, 1), "20m", (Fires("info", "25%"),)),
    Case("RotaUnmanagedConsumers", "one consumer was online for a short time", members(3, 1), "10m"),
    Case("RotaUnmanagedConsumers", "there are only members", members(3), "20m"),
    Case(
        "RotaDuplicateClientId",
        "two share one",
        of_group("group_problem", "1x60", ', reason="DuplicateClientIds"'),
        "10m",
        (Fires("critical"),),
    ),
    Case(
        "RotaDuplicateClientId",
        "for a moment",
        of_group("group_problem", "1x60", ', reason="DuplicateClientIds"'),
        "4m",
    ),
    Case(
        "RotaDuplicateClientId",
        "something else is wrong",
        of_group("group_problem", "1x60", ', reason="NoSidecar"'),
        "10m",
    ),
    Case(
        "RotaDeliveriesFailing",
        "most fail",
        failing("0.93x60", "1x60"),
        "5m",
        (Fires("critical", "93%"),),
    ),
    Case("RotaDeliveriesFailing", "for a moment", failing("0.93x2 0.2x60", "1x2 stale"), "5m"),
    Case("RotaDeliveriesFailing", "some fail", of_group("delivery_failed_ratio", "0.4x60"), "10m"),
    Case(
        "RotaClientCertificateExpiring",
        "five of ninety days are left",
        certificate(5, 90),
        "10m",
        (Fires("warning", "4d 23h 50m 0s"),),
    ),
    Case(
        "RotaClientCertificateExpiring",
        "the certificate of a member has expired, the operator has a new one",
        certificate(90, 90) | certificate(80, 90, "sidecar") | certificate(0, 90, "sidecar", "b"),
        "10m",
        (Fires("warning", "-10m 0s"),),
    ),
    Case("RotaClientCertificateExpiring", "cert-manager is about to renew it", certificate(30, 90), "10m"),
    Case("RotaClientCertificateExpiring", "it is for a day", certificate(0.4, 1), "10m"),
    Case("RotaClientCertificateExpiring", "it is for ten years", certificate(300, 3650), "10m"),
    Case(
        "RotaIdleMembers",
        "half of them",
        members(4) | of_group("idle_members", "2x240"),
        "70m",
        (Fires("info", "50%"),),
    ),
    Case("RotaIdleMembers", "a spare one", members(9) | of_group("idle_members", "1x240"), "70m"),
    Case(
        "RotaIdleMembers",
        "a rollout has one more",
        members(4) | of_group("idle_members", "0x100 1x20 0x100"),
        "55m",
    ),
    Case(
        "RotaNoLeader",
        "all are standby",
        leader("0x20") | leader("0x20", "rota-2"),
        "5m",
        (Fires("critical", labels=OPERATOR),),
    ),
    Case("RotaNoLeader", "none is scraped", {}, "5m", (Fires("critical", labels={}),)),
    Case("RotaNoLeader", "all operators have ended", leader("1x4 stale"), "6m", (Fires("critical", labels={}),)),
    Case("RotaNoLeader", "another operator takes over", leader("1x6 0x20") | leader("0x9 1x20", "rota-2"), "4m"),
    Case(
        "RotaWatchSilent",
        "it gets no events",
        watch_age("0+30x60"),
        "20m",
        (Fires("warning", "20m 0s", OPERATOR | {"kind": "pods"}),),
    ),
    Case(
        "RotaWatchSilent",
        "it gets no events, and restarts repeatedly",
        watch_age("0 30 60 90 120 150 180 " * 10),
        "20m",
        (Fires("warning", "3m 0s", OPERATOR | {"kind": "pods"}),),
    ),
    Case("RotaWatchSilent", "the API server was unreachable for a moment", watch_age("0+30x6 0x60"), "7m"),
    Case(
        "RotaJournalIncomplete",
        "its disk is full",
        journal("0x10 0+5x40"),
        "12m",
        (Fires("warning", labels=OPERATOR),),
    ),
    Case("RotaJournalIncomplete", "it lost some an hour ago", journal("0x10 7x120"), "60m"),
    Case("RotaJournalIncomplete", "nothing is lost", journal("0x60"), "20m"),
    Case(
        "RotaJournalNotStored",
        "its bucket refuses",
        stored("0x10 0+2x120", "0+2x10 20x120"),
        "40m",
        (Fires("warning", labels=OPERATOR),),
    ),
    Case("RotaJournalNotStored", "its bucket refused for a moment", stored("0x10 0+2x4 8x120", "0+2x140"), "40m"),
    Case("RotaJournalNotStored", "it has nothing to store", stored("0x140", "0x140"), "40m"),
    Case(
        "RotaPipelineOverdue",
        "its job has failed for a day",
        last_success("0x3200"),
        "1500m",
        (Fires("warning", "1d 1h 0m 0s", {"lake": "s3://rota/fleet"}),),
    ),
    Case(
        "RotaPipelineOverdue",
        "it succeeds every hour, another lake's as well",
        last_success(" ".join(f"{hour * 3600}x119" for hour in range(27)))
        | last_success("60000x3200", "/history/lake"),
        "1500m",
    ),
    Case("RotaPipelineOverdue", "it pushes no metrics", {}, "1500m"),
    Case(
        "RotaOwnershipViolated",
        "a queue had two owners",
        violations("TwoOwners", "0x10 2x120") | violations("Unproved", "0x120"),
        "30m",
        (Fires("warning", "2", {"lake": "s3://rota/fleet", "kind": "TwoOwners"}),),
    ),
    Case(
        "RotaOwnershipViolated",
        "queues had no owner, or it is unknown",
        violations("Unowned", "7x120") | violations("Unknown", "3x120") | violations("TwoOwners", "0x120"),
        "30m",
    ),
    Case("RotaOwnershipViolated", "it pushes no metrics", {}, "30m"),
]
