"""The lowering table: who is taken, who is passed over, and what is said about it."""

import pytest

from kvpass import KVPassError
from kvpass.lowering import table
from kvpass.lowering.table import Implementation, Site, implements, select

from common import implementations


@pytest.fixture
def toy_op():
    """An op of its own in the table, with an implementation that serves everything and one that is choosy."""

    @implements("toy", "plain")
    def plain():
        return "plain"

    @implements("toy", "choosy", refuses=lambda site: None if site.device == "cuda" else "it needs a GPU.")
    def choosy():
        return "choosy"

    yield Site("toy", "cpu"), Site("toy", "cuda")
    del table._TABLE["toy"]
    select.cache_clear()


def test_auto_takes_the_latest_that_does_not_refuse(toy_op):
    cpu, cuda = toy_op
    assert select(cpu).name == "plain" and select(cuda).name == "choosy"
    assert isinstance(select(cpu), Implementation) and select(cpu).run() == "plain"


def test_a_name_takes_exactly_that_one(toy_op):
    assert select(toy_op[1], "plain").name == "plain"


def test_an_unknown_name_lists_the_known_ones(toy_op):
    with pytest.raises(KVPassError, match=r"'cutlass' for kvpass::toy.*\['choosy', 'plain'\].*auto"):
        select(toy_op[0], "cutlass")


def test_a_named_implementation_that_refuses_says_why(toy_op):
    with pytest.raises(KVPassError, match=r"'choosy' cannot run kvpass::toy here: it needs a GPU.*'auto'"):
        select(toy_op[0], "choosy")


def test_no_implementation_at_all_gives_every_reason(toy_op):
    del table._TABLE["toy"]["plain"]
    with pytest.raises(KVPassError, match="not choosy: it needs a GPU"):
        select(toy_op[0])


def test_a_new_registration_is_seen_at_once(toy_op):
    assert select(toy_op[0]).name == "plain"
    implements("toy", "newer")(lambda: "newer")
    assert select(toy_op[0]).run() == "newer"


def test_the_choice_and_what_was_passed_over_are_logged(toy_op, caplog):
    with caplog.at_level("INFO", logger="kvpass.lowering"):
        select(toy_op[0])
    assert "kvpass::toy on cpu: plain" in caplog.text and "not choosy: it needs a GPU" in caplog.text


def test_every_op_has_a_reference_that_serves_every_site():
    for op in ("encode", "append_", "append_layers_", "decode", "attend"):
        assert "reference" in implementations(op) and "reference" in table.names()
        for queries in (0, 1, 5):
            assert select(Site(op, "cpu", queries=queries), "reference").name == "reference"
