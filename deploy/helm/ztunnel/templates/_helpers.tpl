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
