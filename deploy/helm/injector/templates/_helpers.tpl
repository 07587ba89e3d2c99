{{- /* A value as text; Helm reads whole numbers as floating ones. */}}
{{- define "injector.text" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{- define "injector.name" -}}
ztunnel-injector{{ if ne .Values.revision "default" }}-{{ .Values.revision }}{{ end }}
{{- end }}

{{- /* As Istio's charts have them on every object and pod. */}}
{{- define "injector.labels" -}}
app: {{ include "injector.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/name: ztunnel-injector
app.kubernetes.io/part-of: istio
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "injector.image" -}}
{{- if contains "/" .Values.image -}}
{{ .Values.image }}
{{- else -}}
{{ .Values.hub }}/{{ .Values.image }}{{ with .Values.tag }}:{{ include "injector.text" . }}{{ with $.Values.variant }}-{{ . }}{{ end }}{{ end }}
{{- end -}}
{{- end }}

{{- define "injector.sidecars" -}}
ztunnel-sidecar-injector{{ if ne .Values.revision "default" }}-{{ .Values.revision }}{{ end }}
{{- end }}

{{- /* The names of all configurations, one a line. */}}
{{- define "injector.configurations" -}}
{{- if and .Values.ambient.enabled (eq .Values.revision "default") }}
- ztunnel-injector
{{- end }}
{{- if .Values.sidecars.enabled }}
- {{ include "injector.sidecars" . }}
{{- range .Values.sidecars.tags }}
- ztunnel-revision-tag-{{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- /* One entry: a list of the values, its name, the URL's path, and what namespace and pod must have. */}}
{{- define "injector.entry" -}}
{{- $root := index . 0 }}
- name: {{ index . 1 }}.inject.ztunnel-py.io
  clientConfig:
    service: {name: {{ include "injector.name" $root }}, namespace: {{ $root.Release.Namespace }}, path: {{ index . 2 }}, port: 443}
  rules:
  - {apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods], scope: Namespaced}
  admissionReviewVersions: [v1]
  sideEffects: None
  timeoutSeconds: 5
  # Only for those who asked: a pod that starts without what it asked for would send outside the mesh.
  failurePolicy: Fail
  reinvocationPolicy: Never
  namespaceSelector:
    matchExpressions:
    {{- range index . 3 }}
    - {{ . }}
    {{- end }}
    - key: kubernetes.io/metadata.name
      operator: NotIn
      values: {{ list "kube-system" "kube-public" "kube-node-lease" "local-path-storage" $root.Release.Namespace | uniq | toJson }}
  objectSelector:
    matchExpressions:
    {{- range index . 4 }}
    - {{ . }}
    {{- end }}
  matchConditions:
  - name: not-host-network
    expression: "!has(object.spec.hostNetwork) || !object.spec.hostNetwork"
{{- end }}

{{- /* The entries of a name that pods ask for: the values, the name, whether those who name none are meant, too. */}}
{{- define "injector.sidecar-entries" -}}
{{- $root := index . 0 }}
{{- $rev := index . 1 }}
{{- $path := printf "/inject/templates/%s" $root.Values.sidecars.template }}
{{- $no_rev := "{key: istio.io/rev, operator: DoesNotExist}" }}
{{- $no_injection := "{key: istio-injection, operator: DoesNotExist}" }}
{{- $asked := printf "{key: istio.io/rev, operator: In, values: [%s]}" $rev }}
{{- $not_out := "{key: sidecar.istio.io/inject, operator: NotIn, values: [\"false\"]}" }}
{{- include "injector.entry" (list $root "rev.namespace.sidecar" $path (list $asked $no_injection) (list $not_out)) }}
{{- include "injector.entry" (list $root "rev.object.sidecar" $path (list $no_rev $no_injection) (list $not_out $asked)) }}
{{- if eq $rev "default" }}
{{- include "injector.entry" (list $root "namespace.sidecar" $path (list "{key: istio-injection, operator: In, values: [enabled]}") (list $not_out)) }}
{{- include "injector.entry" (list $root "object.sidecar" $path (list $no_rev $no_injection) (list "{key: sidecar.istio.io/inject, operator: In, values: [\"true\"]}" $no_rev)) }}
{{- end }}
{{- if index . 2 }}
{{- include "injector.entry" (list $root "auto.sidecar" $path (list $no_rev $no_injection) (list "{key: sidecar.istio.io/inject, operator: DoesNotExist}" $no_rev)) }}
{{- end }}
{{- end }}
