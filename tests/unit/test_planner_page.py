"""The planner's page says what the code says."""

from pathlib import Path

from sp_core.bench.planner_page import PUBLISHED, page

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"


def test_the_page_is_the_generated_one():
    assert PAGE.read_text() == page(), "run: python -m sp_core.bench.planner_page > docs/planner.md"


def test_every_large_difference_has_its_reason():
    rows = [line for line in page().splitlines() if line.startswith("| ") and line.count("|") == 7 and "%" in line]
    assert len(rows) == sum(len(entry.times) - 1 for entry in PUBLISHED)
    for row in rows:
        _, _, _, _, _, difference, why, _ = (cell.strip() for cell in row.split("|"))
        assert bool(why) == (abs(float(difference.rstrip("%"))) > 15)
