"""What a run means: report, error analysis, label errors, dataset checks, comparison, hyperparameter search."""
