"""Which small worlds are gone through; below its floor an exploration is none any more."""

from simulation.exploration.setting import SWIFT, Configuration

M1, M2 = ("m1",), ("m2",)

CONFIGURATIONS = {
    "joining": Configuration(later=1, faults={"restart": 1, "failover": 1}, floor=24_000),
    "dying": Configuration(faults={"die": 1, "failover": 1}, hit=M1, floor=12_000),
    "blind": Configuration(queues=1, faults={"blind": 1, "die": 1}, hit=M1, slow=("see",), floor=16_000),
    "leaving": Configuration(faults={"terminate": 1, "failover": 1}, hit=M1, floor=24_000),
    "leaving-midway": Configuration(later=1, faults={"terminate": 1}, hit=M1, floor=16_000),
    "route": Configuration(faults={"route": 2, "crash": 1}, most=2, hit=M2, floor=9_000),
    "record": Configuration(faults={"delete": 1, "lose": 1}, hit=M2, floor=30_000),
    "record-midway": Configuration(later=1, faults={"delete": 1}, floor=2_800),
    "three": Configuration(members=3, queues=1, faults={"lose": 1, "crash": 1}, hit=M1, floor=15_000),
    "hanging": Configuration(queues=1, faults={"hang": 1}, hit=M1, slow=SWIFT, floor=2_500),
    "late": Configuration(queues=1, faults={"die": 1, "failover": 1}, hit=M1, slow=("show",), floor=11_000),
    "stale": Configuration(queues=1, faults={"lose": 1, "stale": 1}, hit=M1, slow=("see",), floor=1_200),
    "pause": Configuration(queues=1, faults={"pause": 3}, late=True, floor=2_000),
    "app": Configuration(queues=1, faults={"pause": 2, "app": 1}, hit=M1, slow=("place",), floor=2_800),
    "reader": Configuration(queues=1, faults={"pause": 2, "reader": 2}, hit=M1, late=True, floor=1_400),
    "orderly-reader": Configuration(
        queues=1, orderly=True, faults={"pause": 2, "fail": 1, "reader": 2}, hit=M1, floor=2_600
    ),
    "crash": Configuration(
        queues=1, numbered=True, faults={"crash": 1, "restart": 1}, hit=M1, slow=("see",), floor=8_000
    ),
    "crash-late": Configuration(
        queues=1, numbered=True, faults={"crash": 2}, hit=M1, slow=("see", "show"), floor=120_000
    ),
    "absence": Configuration(queues=1, numbered=True, faults={"crash": 2, "absence": 1}, most=2, hit=M1, floor=15_000),
    "schemas": Configuration(
        queues=1, numbered=True, schema=1, faults={"crash": 1, "schema": 1}, hit=M1, slow=("show",), floor=38_000
    ),
    "orderly": Configuration(queues=1, orderly=True, faults={"pause": 2, "fail": 1}, hit=M1, floor=550),
}

# `ROTA_EXPLORE=deep` goes through these, too: a minute each, the last two four.
DEEP = {
    "joining-deep": Configuration(later=1, faults={"crash": 1, "restart": 1}, most=1, hit=M1, floor=36_000),
    "record-deep": Configuration(faults={"delete": 1, "lose": 1, "route": 1}, hit=M2, floor=125_000),
    "pause-deep": Configuration(queues=1, faults={"delete": 1, "lose": 1, "pause": 1}, hit=M1, floor=65_000),
    "three-deep": Configuration(members=3, queues=1, later=1, faults={"hang": 1}, hit=M1, floor=36_000),
    "record-paused": Configuration(later=1, faults={"delete": 1, "pause": 2}, most=3, hit=M1, floor=650_000),
    "lost-drain": Configuration(later=1, faults={"delete": 1, "hang": 1}, hit=M1, floor=550_000),
}
