"""Sends metrics, access logs and spans to an OpenTelemetry collector (OTLP over HTTP), where variables name one.

A front end reads :mod:`~ztunnel.otlp.settings`, and makes the exports of :mod:`~ztunnel.otlp.exporter`. They queue
in an :mod:`~ztunnel.otlp.outbox`, whose thread, and nobody else, uses :mod:`~ztunnel.otlp.client` and with it
OpenTelemetry's library.
"""
