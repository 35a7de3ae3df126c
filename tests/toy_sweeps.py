"""Experiments on results that no trial computed."""

from limner.experiments import load, sweep


def reproduce(name, cells, monkeypatch, folder):
    """Return the finding of an experiment whose trials return `cells`, one result for each setting of its grid."""

    def run_trials(folder, trial, settings, workers):
        seeds = len(settings) // len(cells)
        assert len(settings) == seeds * len(cells) and seeds >= 3
        return [cell for cell in cells for _ in range(seeds)]

    monkeypatch.setattr(sweep, "run_trials", run_trials)
    return load(name).reproduce(folder, False)
