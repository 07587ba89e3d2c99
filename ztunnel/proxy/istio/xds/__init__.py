"""The mesh as istiod describes it: delta xDS subscriptions, applied to the mesh model."""
