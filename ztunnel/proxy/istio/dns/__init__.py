"""The DNS proxy in each pod: answers names of the mesh, forwards the rest."""
