"""Tests logs: the content of a line in both formats, and levels that are not logged."""

import json
import logging
from collections.abc import Iterator

import pytest

from rota import logs
from rota.logs import group_fields
from rota.sidecar.__main__ import configure_logging


@pytest.fixture(autouse=True)
def _restore_loggers() -> Iterator[None]:
    root = logging.getLogger()
    rota = logging.getLogger("rota")
    handlers = [*root.handlers]
    root_level = root.level
    rota_level = rota.level
    yield
    root.handlers[:] = handlers
    root.setLevel(root_level)
    rota.setLevel(rota_level)


def test_log_of_a_group_has_its_fields_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure()
    fields = group_fields("shop", "orders", seconds=2.5)
    logging.getLogger("rota.kube").warning("A reconcile failed: %s", "timed out", extra=fields)
    line = json.loads(capsys.readouterr().err)
    assert line.pop("at").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "rota.kube",
        "message": "A reconcile failed: timed out",
        "namespace": "shop",
        "group": "orders",
        "seconds": 2.5,
    }


def test_log_as_text_ends_with_its_fields_and_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(log_format="text")
    try:
        int("queue")
    except ValueError:
        logging.getLogger("rota.kube").exception("A reconcile failed", extra=group_fields("shop", "orders"))
    line, *error = capsys.readouterr().err.splitlines()
    assert line.partition("Z ")[2] == "ERROR   rota.kube: A reconcile failed namespace=shop group=orders"
    assert error[-1].startswith("ValueError: invalid literal")


def test_log_of_a_sidecar_names_its_pod_in_each_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging({"POD_NAME": "orders-a", "POD_NAMESPACE": "shop", "ROTA_LOG_LEVEL": "debug"})
    logging.getLogger("rota.sidecar").debug("A pull failed")
    line = json.loads(capsys.readouterr().err)
    assert (line["namespace"], line["member"], line["level"]) == ("shop", "orders-a", "debug")


def test_log_has_warnings_only_of_other_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug")
    logging.getLogger("aiohttp").info("An access")
    assert capsys.readouterr().err == ""
    logs.configure("error")
    logging.getLogger("rota").warning("A problem")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("level", "style"), [("loud", "json"), ("info", "xml")])
def test_log_option_that_does_not_exist_is_rejected(level: str, style: str) -> None:
    with pytest.raises(ValueError, match="choose one of"):
        logs.configure(level, style)
