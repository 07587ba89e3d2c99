"""Runs the tunnel library on sockets: one poller per event loop calls callbacks for received bytes, and coroutines
handle connections.
"""
