"""Wire messages: ``.proto`` files, the code generated from them, and how to find, read and print them.

``registry``  type URL -> message class, ``Any`` -> message
``json``      JSON and YAML -> message, with paths in errors and a report of unknown fields
``dump``      message -> JSON as Envoy's admin interface prints it, with secrets redacted on request
``generate``  ``make proto``

Messages carry the full names of Envoy's, xDS's and Istio's APIs and the fields this proxy reads or
prints; every other field is kept as an unknown field from parsing to serialising.
"""
