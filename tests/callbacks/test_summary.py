import io

from flaxfit.callbacks import SummaryLogger


def test_lines_hold_step_metrics_and_speed_aligned(checkpoint_at, make_loop):
    file = io.StringIO()
    log = SummaryLogger(file=file)
    log.attach(make_loop(n_steps=1_000_000))
    log(checkpoint_at(1, loss=1.25))
    log(checkpoint_at(125_000, loss=1.2e-5, n_completed_steps=4500, elapsed_time=2.0))
    assert file.getvalue() == (
        "step         1:  loss 1.2500\nstep   125,000:  loss 1.20e-05  2,250 steps/s\n"
    )


def test_lines_go_to_standard_error_so_that_piped_output_stays_clean(checkpoint_at, capsys):
    SummaryLogger()(checkpoint_at(1, loss=1.25))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "step      1:  loss 1.2500\n"
