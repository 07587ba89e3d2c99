"""The data path of Envoy's dialect: how a connection is carried from accept to end."""
