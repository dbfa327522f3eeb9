"""Reading a run's log and plotting it."""

import pytest

from basis_rl.report.plots import plot_training

LOG = [{"step": i, "reward": 0.1 * i, "baseline/beta": 5 / (i + 1), "baseline/mse_to_reward": 0.2} for i in range(8)]


@pytest.mark.parametrize("keys", [("reward", "baseline/beta", "baseline/mse_to_reward"), ("reward",), ()])
def test_a_run_that_has_logged_something_has_a_plot(tmp_path, keys):
    log = [{k: v for k, v in row.items() if k in (*keys, "step")} for row in LOG]
    plot_training([*log, {"step": 9, "train_runtime": 1.0}], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists() == bool(keys)
    assert not keys or (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
