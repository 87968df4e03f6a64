"""The model's side of a step: plan -> batch -> forward -> sampled tokens."""
