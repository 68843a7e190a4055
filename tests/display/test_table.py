"""Tables whose rows come one at a time."""

from flaxfit.display import Table, place

METRICS = {"loss": 0.5, "accuracy": 0.75, "f1_macro": 0.25, "val_loss": 0.5, "val_f1_macro": 0.125}


def lines_of(table, width, **options):
    return table.rows(" 1/10", 0.25, METRICS, width=width, **options)


def test_columns_are_aligned_below_one_header():
    table = Table("epoch")
    lines = table.rows(" 1/10", 0.482, {"loss": 1.5, "val_accuracy": 0.5}, best="val_accuracy")
    lines += table.rows("10/10", 65, {"loss": 123456.789, "val_accuracy": 0.25})
    assert lines == [
        "epoch     time     loss  val_accuracy",
        " 1/10   482 ms   1.5000        0.5000 *",
        "10/10   1m 05s   123457        0.2500",
    ]


def test_no_line_is_longer_than_the_terminal_and_the_monitored_column_stays():
    for width in range(35, 120):
        header, row = lines_of(Table("epoch"), width, monitor="val_f1_macro", best="val_f1_macro")
        assert max(len(header), len(row)) <= width
        assert "val_f1_macro" in header and row.endswith("0.1250 *")
        assert header.endswith("…") == (len(header.split()) < 7 + header.endswith("…"))


def test_losses_and_validation_are_kept_longer_than_other_metrics():
    header, row = lines_of(Table("epoch"), 60)
    assert header == "epoch     time     loss  accuracy  val_loss  val_f1_macro …"
    header, row = lines_of(Table("epoch"), 45)
    assert header == "epoch     time     loss  accuracy  val_loss …"
    header, row = lines_of(Table("epoch"), 36)
    assert header == "epoch     time     loss  val_loss …"
    assert row == " 1/10   250 ms   0.5000    0.5000"


def test_a_metric_that_comes_later_makes_a_new_header_unless_it_was_expected():
    for expected, n_headers in ((), 2), (("val_loss",), 1):
        table = Table("epoch", expected)
        lines = table.rows("1", 1, {"loss": 0.5}) + table.rows("2", 1, {"loss": 0.5, "val_loss": 1})
        lines += table.rows("3", 1, {"loss": 0.5})
        assert sum("time" in line for line in lines) == n_headers
        assert lines[-1] == "    3     1.0s   0.5000"


def test_colours_take_no_room():
    plain, painted = lines_of(Table("epoch"), 60), lines_of(Table("epoch"), 60, colour=True)
    for before, after in zip(plain, painted, strict=True):
        for code in "\x1b[32m", "\x1b[2m", "\x1b[0m":
            after = after.replace(code, "")
        assert after == before


def test_places_are_as_wide_as_the_last():
    assert place(3, 10) == " 3/10" and place(3, 1000) == "    3/1,000"
    assert place(3, None) == "      3"
