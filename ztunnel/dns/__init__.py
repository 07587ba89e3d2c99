"""The DNS proxy of pods: answers for services of the mesh, forwards the rest."""
