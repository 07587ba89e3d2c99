"""What any process of this project needs: clocks, tasks, accepted sockets, the heap, readers of settings."""
