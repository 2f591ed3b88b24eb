{{/* The spec of the Job that trains, on one node or on several. Arguments: root, name, labels, tag, tls, model, context. */}}
{{- define "starpod.trainerJob" -}}
{{- $root := .root }}
{{- $name := .name }}
{{- $labels := .labels }}
{{- $tag := .tag }}
{{- $tls := .tls }}
{{- $model := .model }}
{{- $context := .context }}
{{- with .root.Values.trainer }}
{{- $nodes := int .nodes }}
{{- $processes := int .processes }}
{{- $torchrun := or (gt $nodes 1) (gt $processes 1) }}
{{- $onGpu := gt (int .vllm.gpus) 0 }}
{{- if gt $nodes 1 }}
# A pod for each node.
completionMode: Indexed
completions: {{ $nodes }}
parallelism: {{ $nodes }}
backoffLimit: 0
{{- else }}
backoffLimit: {{ .backoffLimit }}
{{- end }}
podFailurePolicy:
  rules:
    {{- if eq $nodes 1 }}
    # Do not retry a wrong command line or configuration (exit status 2), and do not count the loss of a node. After other
    # failures, the next pod resumes from the last checkpoint.
    {{- else }}
    # Do not retry a wrong command line or configuration (exit status 2). Other failures and lost nodes restart all pods.
    {{- end }}
    - action: FailJob
      onExitCodes: {containerName: trainer, operator: In, values: [2]}
    {{- if eq $nodes 1 }}
    - action: Ignore
      onPodConditions: [{type: DisruptionTarget, status: "True"}]
    {{- end }}
template:
  metadata:
    labels:
      {{- include "starpod.podLabels" $labels | nindent 6 }}
      starpod/client: "true"
  spec:
    {{- include "starpod.pod" (dict "root" $root "node" .) | nindent 4 }}
    restartPolicy: Never
    terminationGracePeriodSeconds: {{ add .graceSeconds 60 }}
    initContainers:
      {{- range $place, $address := .addresses }}
      - name: wait-{{ $place }}
        {{- include "starpod.container" (dict "root" $root "image" $root.Values.trainer.image "tag" $tag) | nindent 8 }}
        command:
          - sh
          - -c
          - trap "exit 143" TERM; until "$@"; do sleep 2; done
          - wait
          - /opt/starpod/bin/starpod
          - list
          - {{ $address }}
          {{- if $root.Values.tokens.secret }}
          - --token-file=/etc/starpod/tokens/token
          {{- end }}
          {{- if $tls }}
          - --ca=/etc/starpod/tls/ca.crt
          - --certificate=/etc/starpod/tls/tls.crt
          - --key=/etc/starpod/tls/tls.key
          {{- end }}
        resources:
          requests: {cpu: 100m, memory: 128Mi}
          limits: {cpu: "1", memory: 256Mi}
        volumeMounts:
          - {name: tmp, mountPath: /tmp}
          {{- if $tls }}
          - {name: tls, mountPath: /etc/starpod/tls, readOnly: true}
          {{- end }}
          {{- if $root.Values.tokens.secret }}
          - {name: tokens, mountPath: /etc/starpod/tokens, readOnly: true}
          {{- end }}
      {{- end }}
      {{- if .vllm.enabled }}
      # A sidecar, which is ready before the trainer starts and stops after it. It listens only on the pod's loopback
      # address: its development endpoints let anybody replace the weights.
      - name: vllm
        restartPolicy: Always
        {{- include "starpod.container" (dict "root" $root "image" .image "tag" $tag) | nindent 8 }}
        args:
          - vllm
          - {{ $model }}
          - --host=127.0.0.1
          - --port=8000
          - --dtype={{ .vllm.dtype }}
          - --max-model-len={{ int $context }}
          {{- range .vllm.arguments }}
          - {{ . | quote }}
          {{- end }}
        {{- if or .hub.secret (not $onGpu) }}
        env:
          {{- if not $onGpu }}
          # Use a thread for each core of the limit. The KV cache's size is in GiB.
          - name: OMP_NUM_THREADS
            valueFrom: {resourceFieldRef: {resource: limits.cpu}}
          - {name: VLLM_CPU_KVCACHE_SPACE, value: {{ .vllm.cpuCache | quote }}}
          {{- end }}
          {{- if .hub.secret }}
          - name: HF_TOKEN
            valueFrom: {secretKeyRef: {name: {{ .hub.secret }}, key: {{ .hub.key }}}}
          {{- end }}
        {{- end }}
        # Wait up to 30 minutes, since the model may have to be downloaded first.
        startupProbe:
          exec:
            command:
              - /opt/starpod/bin/python
              - -c
              - import urllib.request; urllib.request.urlopen("http://127.0.0.1:8000/health", timeout=5)
          periodSeconds: 5
          timeoutSeconds: 10
          failureThreshold: 360
        resources: {{- include "starpod.gpus" (dict "resources" .vllm.resources "name" .gpuResource "count" .vllm.gpus) | nindent 10 }}
        volumeMounts:
          - {name: tmp, mountPath: /tmp}
          - {name: cache, mountPath: /cache}
          - {name: shared-memory, mountPath: /dev/shm}
          - {name: handover, mountPath: /handover}
      {{- end }}
    containers:
      - name: trainer
        {{- include "starpod.container" (dict "root" $root "image" .image "tag" $tag) | nindent 8 }}
        {{- if $torchrun }}
        # torchrun, which by itself would exit with status 1 where the trainer exits with 2.
        command: [/opt/starpod/bin/python, -m, starpod.trainer.parallel.launch]
        {{- end }}
        args:
          {{- if $torchrun }}
          {{- if gt $nodes 1 }}
          - --nnodes={{ $nodes }}
          - --rdzv-backend=c10d
          - --rdzv-endpoint={{ $name }}-trainer-0-0.{{ $name }}:29500
          - --rdzv-id={{ .run }}
          {{- end }}
          - --nproc-per-node={{ $processes }}
          - --shutdown-timeout={{ .graceSeconds }}
          - -m
          - starpod.cli.main
          {{- end }}
          - train
          - /etc/starpod/run/config.yaml
          - --run-dir=/runs/{{ .run }}
          - --resume-or-start
        {{- if .hub.secret }}
        env:
          - name: HF_TOKEN
            valueFrom: {secretKeyRef: {name: {{ .hub.secret }}, key: {{ .hub.key }}}}
        {{- end }}
        resources: {{- include "starpod.gpus" (dict "resources" .resources "name" .gpuResource "count" .gpus) | nindent 10 }}
        volumeMounts:
          - {name: tmp, mountPath: /tmp}
          - {name: runs, mountPath: /runs}
          - {name: cache, mountPath: /cache}
          - {name: shared-memory, mountPath: /dev/shm}
          - {name: config, mountPath: /etc/starpod/run, readOnly: true}
          {{- if .vllm.enabled }}
          - {name: handover, mountPath: /handover}
          {{- end }}
          {{- if $tls }}
          - {name: tls, mountPath: /etc/starpod/tls, readOnly: true}
          {{- end }}
          {{- if $root.Values.tokens.secret }}
          - {name: tokens, mountPath: /etc/starpod/tokens, readOnly: true}
          {{- end }}
    volumes:
      - name: tmp
        emptyDir: {sizeLimit: 16Gi}
      - name: shared-memory
        emptyDir: {medium: Memory, sizeLimit: {{ .sharedMemory }}}
      - name: config
        configMap: {name: {{ $name }}}
      - name: runs
        persistentVolumeClaim: {claimName: {{ .runs.claim | default (include "starpod.name" (dict "root" $root "name" "runs")) }}}
      - name: cache
        {{- if .cache.claim }}
        persistentVolumeClaim: {claimName: {{ .cache.claim }}}
        {{- else }}
        emptyDir: {sizeLimit: {{ .cache.size }}}
        {{- end }}
      {{- if .vllm.enabled }}
      # The trainer writes new weights here, and vLLM loads them.
      - name: handover
        emptyDir: {}
      {{- end }}
      {{- if $tls }}
      - name: tls
        secret:
          secretName: {{ include "starpod.clientSecret" $root }}
          defaultMode: 0440
      {{- end }}
      {{- with $root.Values.tokens }}
      {{- if .secret }}
      - name: tokens
        secret:
          secretName: {{ .secret }}
          defaultMode: 0440
          items: [{key: {{ .clientKey }}, path: token}]
      {{- end }}
      {{- end }}
{{- end }}
{{- end }}
