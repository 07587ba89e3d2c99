"""Sends metrics, access logs and spans to the OpenTelemetry collector (OTLP over HTTP) that variables name.

A front end reads :mod:`~ztunnel.proxy.otlp.settings`, and creates the exports of
:mod:`~ztunnel.proxy.otlp.exporter`. They queue in an :mod:`~ztunnel.proxy.otlp.outbox`. Only its thread uses
:mod:`~ztunnel.proxy.otlp.client` and OpenTelemetry's library.
"""
