"""The configurations that are explored; fewer states than `min_states` mean that an exploration is incomplete."""

from simulation.exploration.setting import INSTANT, Configuration

M1, M2 = ("m1",), ("m2",)

CONFIGURATIONS = {
    "joining": Configuration(late_members=1, faults={"restart": 1, "failover": 1}, min_states=35_000),
    "dying": Configuration(faults={"die": 1, "failover": 1}, fault_targets=M1, min_states=112_000),
    "blind": Configuration(queues=1, faults={"blind": 1, "die": 1}, fault_targets=M1, slow=("see",), min_states=82_000),
    "leaving": Configuration(faults={"terminate": 1, "failover": 1}, fault_targets=M1, min_states=134_000),
    "leaving-midway": Configuration(late_members=1, faults={"terminate": 1}, fault_targets=M1, min_states=38_000),
    "route": Configuration(faults={"route": 2, "crash": 1}, max_faults=2, fault_targets=M2, min_states=28_000),
    "record": Configuration(faults={"delete": 1, "lose": 1}, fault_targets=M2, min_states=66_000),
    "record-midway": Configuration(late_members=1, faults={"delete": 1}, min_states=4_700),
    "record-blind": Configuration(
        late_members=1, faults={"delete": 1, "blind": 1}, fault_targets=M1, slow=("see",), min_states=420_000
    ),
    "three": Configuration(members=3, queues=1, faults={"lose": 1, "crash": 1}, fault_targets=M1, min_states=22_000),
    "hanging": Configuration(queues=1, faults={"hang": 1}, fault_targets=M1, slow=INSTANT, min_states=14_500),
    "late": Configuration(
        queues=1, faults={"die": 1, "failover": 1}, fault_targets=M1, slow=("show",), min_states=315_000
    ),
    "stale": Configuration(queues=1, faults={"lose": 1, "stale": 1}, fault_targets=M1, slow=("see",), min_states=1_700),
    "pause": Configuration(queues=1, faults={"pause": 3}, late_timers=True, min_states=2_600),
    "app": Configuration(queues=1, faults={"pause": 2, "app": 1}, fault_targets=M1, slow=("place",), min_states=4_300),
    "reader": Configuration(
        queues=1, faults={"pause": 2, "reader": 2}, fault_targets=M1, late_timers=True, min_states=2_200
    ),
    "orderly-reader": Configuration(
        queues=1, orderly=True, faults={"pause": 2, "fail": 1, "reader": 2}, fault_targets=M1, min_states=4_300
    ),
    "crash": Configuration(
        queues=1,
        with_incarnations=True,
        faults={"crash": 1, "restart": 1},
        fault_targets=M1,
        slow=("see",),
        min_states=12_000,
    ),
    "crash-late": Configuration(
        queues=1,
        with_incarnations=True,
        faults={"crash": 2},
        fault_targets=M1,
        slow=("see", "show"),
        min_states=610_000,
    ),
    "absence": Configuration(
        queues=1,
        with_incarnations=True,
        faults={"crash": 2, "absence": 1},
        max_faults=2,
        fault_targets=M1,
        min_states=21_000,
    ),
    "schemas": Configuration(
        queues=1,
        with_incarnations=True,
        schema=1,
        faults={"crash": 1, "schema": 1},
        fault_targets=M1,
        slow=("show",),
        min_states=170_000,
    ),
    "orderly": Configuration(queues=1, orderly=True, faults={"pause": 2, "fail": 1}, fault_targets=M1, min_states=880),
}

# Explored only with `ROTA_EXPLORE=deep`: a minute each, the last two four minutes each.
DEEP = {
    "joining-deep": Configuration(
        late_members=1, faults={"crash": 1, "restart": 1}, max_faults=1, fault_targets=M1, min_states=36_000
    ),
    "record-deep": Configuration(faults={"delete": 1, "lose": 1, "route": 1}, fault_targets=M2, min_states=125_000),
    "pause-deep": Configuration(
        queues=1, faults={"delete": 1, "lose": 1, "pause": 1}, fault_targets=M1, min_states=65_000
    ),
    "three-deep": Configuration(
        members=3, queues=1, late_members=1, faults={"hang": 1}, fault_targets=M1, min_states=36_000
    ),
    "record-paused": Configuration(
        late_members=1, faults={"delete": 1, "pause": 2}, max_faults=3, fault_targets=M1, min_states=650_000
    ),
    "lost-drain": Configuration(late_members=1, faults={"delete": 1, "hang": 1}, fault_targets=M1, min_states=550_000),
}
