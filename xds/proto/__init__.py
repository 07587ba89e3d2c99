"""Wire messages: ``.proto`` files, the generated code, and modules that find, read and print messages.

``registry``  type URL -> message class, ``Any`` -> message
``json``      JSON and YAML -> message, with paths in errors and a report of unknown fields
``dump``      message -> JSON as Envoy's admin interface prints it, with secrets redacted on request
``generate``  ``make proto``

Messages have the full names of the Envoy, xDS and Istio APIs, but only the fields that this proxy reads or prints.
All other fields are kept as unknown fields from parsing to serialising.
"""
