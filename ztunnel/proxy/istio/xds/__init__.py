"""The mesh as sent by istiod: delta xDS subscriptions, applied to the mesh model."""
