"""The tunnel library on sockets: one poller per event loop, callbacks per chunk, coroutines per connection."""
