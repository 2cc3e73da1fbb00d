//! Simulated storage with faults and power loss, the conformance suite, the model disk (for tests only).
