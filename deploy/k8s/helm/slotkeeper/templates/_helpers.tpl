{{- define "slotkeeper.fullname" -}}
{{- $usual := contains .Chart.Name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) }}
{{- .Values.fullnameOverride | default $usual | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "slotkeeper.selectorLabels" -}}
app.kubernetes.io/name: slotkeeper
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "slotkeeper.labels" -}}
{{ include "slotkeeper.selectorLabels" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* What the kustomizations have, and what their overlay for this accelerator changes. */}}
{{- define "slotkeeper.defaults" -}}
{{ .Files.Get "files/defaults.yaml" }}
{{- end }}

{{- define "slotkeeper.accelerator" -}}
{{ get (include "slotkeeper.defaults" . | fromYaml).accelerators .Values.accelerator | toYaml }}
{{- end }}

{{- /* Mappings as one; those further behind win, key by key (`merge` of Sprig would ignore `false`). */}}
{{- define "slotkeeper.together" -}}
{{- $all := dict }}
{{- range . }}{{ range $key, $value := . }}{{ $_ := set $all $key $value }}{{ end }}{{ end }}
{{- toYaml $all }}
{{- end }}

{{- /* Data of a ConfigMap. Numbers go through JSON, which writes large ones without an exponent. */}}
{{- define "slotkeeper.variables" -}}
{{- range $name, $value := . }}
{{ $name }}: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- end }}

{{- define "slotkeeper.settings" -}}
{{- $usual := (include "slotkeeper.defaults" . | fromYaml).settings }}
{{- with .Values.store }}
{{- if .url }}
{{- $usual = omit $usual "SLOTKEEPER_COLD_DIR" "SLOTKEEPER_COLD_BYTES" }}
{{- $_ := set $usual "SLOTKEEPER_COLD_STORE" .url }}
{{- $_ := set $usual "SLOTKEEPER_COLD_STORE_BYTES" .bytes }}
{{- end }}
{{- if .keySecret }}{{ $_ := set $usual "SLOTKEEPER_STORE_KEY_FILE" "/run/secrets/store/key" }}{{ end }}
{{- end }}
{{- include "slotkeeper.together" (list $usual .Values.settings) }}
{{- end }}

{{- define "slotkeeper.engineSettings" -}}
{{- $usual := (include "slotkeeper.defaults" . | fromYaml).engine }}
{{- $gpu := (include "slotkeeper.accelerator" . | fromYaml).engine }}
{{- with .Values.engine }}
{{- $own := dict "MODEL" .model "PARALLEL" .slots "CTX_SIZE" .contextTokens "CHECKPOINTS" .checkpoints }}
{{- include "slotkeeper.together" (list $usual $gpu $own .env) }}
{{- end }}
{{- end }}

{{- define "slotkeeper.engineTag" -}}
{{ .Values.engine.image.tag | default (include "slotkeeper.accelerator" . | fromYaml).tag }}
{{- end }}

{{- define "slotkeeper.engineResources" -}}
{{- $usual := (include "slotkeeper.accelerator" . | fromYaml).resources }}
{{- include "slotkeeper.together" (list $usual .Values.engine.resources) }}
{{- end }}

{{- define "slotkeeper.resources" -}}
{{- $usual := (include "slotkeeper.defaults" . | fromYaml).resources }}
{{- $usual = .Values.storage.hot.inMemory | ternary $usual.inMemory $usual.onDisk }}
{{- include "slotkeeper.together" (list $usual .Values.resources) }}
{{- end }}

{{- define "slotkeeper.groups" -}}
{{- $usual := (include "slotkeeper.accelerator" . | fromYaml).supplementalGroups }}
{{- kindIs "slice" .Values.supplementalGroups | ternary .Values.supplementalGroups $usual | toYaml }}
{{- end }}

{{- define "slotkeeper.tolerations" -}}
{{- $usual := (include "slotkeeper.accelerator" . | fromYaml).tolerations }}
{{- kindIs "slice" .Values.tolerations | ternary .Values.tolerations $usual | toYaml }}
{{- end }}

{{- define "slotkeeper.modelsClaim" -}}
{{ .Values.storage.models.existingClaim | default (printf "%s-models" (include "slotkeeper.fullname" .)) }}
{{- end }}

{{- /* The store, which may be anywhere, by its port, and DNS. */}}
{{- define "slotkeeper.egress" }}
{{- if .Values.store.url }}
- ports:
    - port: {{ .Values.store.port }}
- to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: kube-system
  ports:
    - port: 53
      protocol: UDP
    - port: 53
{{- end }}
{{- with .Values.networkPolicy.egress }}
{{ toYaml . }}
{{- end }}
{{- end }}
