"""One group as it is known: in whatever order it is told."""

from rota.documents import Assignment, write_assignment
from rota.kube.group import Group
from rota.kube.objects import ConfigMap, Custom, Metadata, Owner

BODY = Custom(Metadata("orders", uid="1", namespace="shop"))
DOCUMENT = Assignment(group="shop/orders", generation=7, issued_at="2026-11-21T08:00:00.000Z")
TEXTS = {name: text for name, text in write_assignment(DOCUMENT).items() if isinstance(text, str)}
RECORD = ConfigMap(
    Metadata(
        "orders-rota",
        namespace="shop",
        resource_version="42",
        labels={"rota.dev/group": "orders"},
        owner_references=[Owner("1", controller=True)],
    ),
    data=TEXTS,
)


def test_a_record_that_comes_before_its_group_is_not_taken_for_somebody_elses() -> None:
    group = Group("shop", "orders")
    group.keep(RECORD)
    assert not group.record.ours
    group.wants(BODY, None)
    assert not group.looked
    group.keep(RECORD)  # as it is read now
    assert group.record.ours
    assert group.record.document is not None
    assert group.record.document.generation == 7


def test_a_record_of_the_group_that_had_the_name_before_is_not_this_ones() -> None:
    group = Group("shop", "orders")
    group.wants(BODY, None)
    group.keep(RECORD)
    group.wants(Custom(Metadata("orders", uid="2", namespace="shop")), None)
    group.keep(RECORD)
    assert not group.record.ours
