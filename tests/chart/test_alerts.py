"""The chart's alerts, evaluated by the real promtool: each fires in the cases that need it, and in no other."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from chart.alert_cases import ALERTS, CASES, FILE, GROUPS, Case
from ground.fixtures import skip_what_is_missing
from ground.prometheus import promtool


@pytest.fixture(scope="module")
def tool() -> Path:
    with skip_what_is_missing():
        return promtool()


def errors_of(*command: Any) -> str:
    process = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    return "" if process.returncode == 0 else process.stdout + process.stderr


def test_alert_rules_are_accepted_by_promtool(tool: Path) -> None:
    assert errors_of(tool, "check", "rules", FILE) == ""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_alert_fires_only_where_it_should(tool: Path, tmp_path: Path, case: Case) -> None:
    test_file = tmp_path / "test.yaml"
    content = {
        "rule_files": [str(FILE)],
        "evaluation_interval": "1m",
        # Without it promtool evaluates groups in any order: an alert may see another group's records a minute late.
        "group_eval_order": [group["name"] for group in GROUPS],
        "tests": [case.test()],
    }
    test_file.write_text(json.dumps(content))  # JSON is YAML
    assert errors_of(tool, "test", "rules", test_file) == ""


def test_alert_cases_cover_firing_and_silence_of_each_alert() -> None:
    firing = {(case.alert, alert.severity) for case in CASES for alert in case.fires}
    silent = {(name, severity) for name, severity in ALERTS for case in CASES if case.alert == name and not case.fires}
    assert (firing, silent) == (set(ALERTS), set(ALERTS))
