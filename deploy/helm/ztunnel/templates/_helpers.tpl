{{- define "ztunnel.name" -}}
{{ .Values.resourceName | default "ztunnel" }}
{{- end }}

{{- define "ztunnel.image" -}}
{{- if contains "/" .Values.image -}}
{{ .Values.image }}
{{- else -}}
{{ .Values.hub | default .Values.global.hub }}/{{ .Values.image }}:{{ .Values.tag | default .Values.global.tag }}{{ with .Values.variant | default .Values.global.variant }}-{{ . }}{{ end }}
{{- end -}}
{{- end }}

{{- define "ztunnel.istiod" -}}
istiod{{ with .Values.revision }}-{{ . }}{{ end }}.{{ .Values.istioNamespace | default .Values.global.istioNamespace }}.svc:15012
{{- end }}

{{- define "ztunnel.labels" -}}
app: ztunnel
app.kubernetes.io/name: ztunnel
{{- with .Values.revision }}
istio.io/rev: {{ . | quote }}
{{- end }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "ztunnel.netpol-labels" -}}
app: ztunnel-netpol
app.kubernetes.io/name: ztunnel-netpol
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "ztunnel.netpol-in-tunnels" -}}
{{ if and .Values.netpol.enabled (eq .Values.netpol.tunnels "allow") }}yes{{ end }}
{{- end }}

{{- define "ztunnel.platform" -}}
{{ .Values.platform | default .Values.global.platform }}
{{- end }}

{{- define "ztunnel.of-namespace" -}}
{{ if or (eq .Values.resourceScope "ALL") (eq .Values.resourceScope "NAMESPACE") }}yes{{ end }}
{{- end }}

{{- define "ztunnel.of-cluster" -}}
{{ if or (eq .Values.resourceScope "ALL") (eq .Values.resourceScope "CLUSTER") }}yes{{ end }}
{{- end }}

{{- define "ztunnel.roots" -}}
{{- $name := .Values.trustBundleName | default .Values.global.trustBundleName -}}
{{- if eq (get .Values.env "ENABLE_CLUSTER_TRUST_BUNDLE_API" | toString) "true" -}}
clusterTrustBundle:
  name: istio.io:istiod-ca:{{ $name | default "root-cert" }}
  path: root-cert.pem
{{- else -}}
configMap:
  name: {{ $name | default "istio-ca-root-cert" }}
{{- end -}}
{{- end }}
