"""Issues, requests and revokes SPIFFE certificates, and checks peers' chains."""
