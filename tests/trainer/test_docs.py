"""The examples of docs/trainer.md run, one after the other, and show what the text says."""

import re

from tests.trainer.launch import ROOT, run
from trainer.spec import TrainSpec

DOCUMENT = (ROOT / "docs" / "trainer.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)


def test_examples_run(tmp_path):
    script = tmp_path / "examples.py"
    script.write_text("\n\n".join(EXAMPLES))
    job = run(script, 1, timeout_s=150)
    assert job.status == 0, job.output
    assert "Error in atexit" not in job.output, job.output
    lines = job.lines_of(0)
    # The first example's line as shown in the text, whatever its numbers are.
    shown = re.search(r"`12:00:00 (step 5/13, .*?)`", DOCUMENT).group(1)
    pattern = re.sub(r"(?<=loss )\S+(?=,)|\d+(?= samples)", r"\\S+", shown)
    assert any(re.match(r"\d\d:\d\d:\d\d " + pattern + "$", line) for line in lines), job.output
    assert sum(", validation: " in line and "accuracy" in line for line in lines) == 2, job.output
    assert [int(line.split()[-1]) for line in lines if line.startswith("accuracy ")] == [10, 20, 30, 40]
    assert "went on from step 10 to 25" in lines
    keys = re.search(r"# (learning_rate, .*)", DOCUMENT).group(1).split(", ")
    assert str(keys) in lines, job.output


def test_every_parameter_is_described():
    table = DOCUMENT.split("## Parameters")[1].split("## Members")[0]
    described = [
        name
        for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    ]
    assert sorted(described) == sorted(TrainSpec.__dataclass_fields__)
