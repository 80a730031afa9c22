"""The loops: training on one screen, evaluation and prediction."""
