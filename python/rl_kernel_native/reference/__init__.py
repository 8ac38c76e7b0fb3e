"""Plain float64 references: what an operator computes, not how. They run only on request."""
