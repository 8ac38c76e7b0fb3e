"""Plain float64 references: what an operator computes, not how. Run only when asked for."""
