"""DisagMoE: attention and experts of a Mixture-of-Experts model trained on disjoint groups of workers."""
