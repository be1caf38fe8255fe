#!/usr/bin/env bash
# The whole comparison on a machine with one NVIDIA GPU, in under 6 minutes, building nothing:
#
#   LLAMA_CPP_LIB_PATH=FOLDER bench/gpu.sh MODEL.gguf [RESULTS]
#
# FOLDER holds the CUDA libraries of the llama.cpp that pyproject.toml pins, and llama-server and
# llama-batched-bench beside them. Tables go to the terminal; tables, JSON and plots to RESULTS (bench/results/gpu).
# Each part has its limit of time, all together have theirs, and one that fails leaves the others be. Smaller runs:
# set what is set below.
set -uo pipefail

model=${1:?"usage: LLAMA_CPP_LIB_PATH=FOLDER bench/gpu.sh MODEL.gguf [RESULTS]"}
results=${2:-bench/results/gpu}
folder=${LLAMA_CPP_LIB_PATH:?"the folder of the CUDA libraries"}

: "${PYTHON:=python3}" "${GPU_LAYERS:=-1}" "${SLOTS:=64}" "${CTX_SIZE:=4096}" "${BATCH_SIZE:=512}"
: "${BATCHES:=1,8,32,64,128,256}" "${CLIENTS:=1,8,64}" "${TOKENS:=128}" "${ROUNDS:=3}" "${RATES:=20,60}"
: "${PROMPT_TOKENS:=2000}" "${SYSTEM_TOKENS:=1000}" "${REQUESTS:=16}" "${SECONDS_OF_ARRIVALS:=2}"
: "${SAMPLED:=64}" "${LIMIT_S:=350}"

fail() {  # what is missing, before anything is waited for
  echo "gpu.sh: $1" >&2
  exit 1
}

[ -r "$model" ] || fail "no model at $model"
for name in libllama.so llama-server llama-batched-bench; do
  compgen -G "$folder/$name*" > /dev/null || fail "no $name in LLAMA_CPP_LIB_PATH, $folder"
done

export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# An interpreter that brings an older libstdc++ would crash when the libraries load.
libstdcxx=/usr/lib/x86_64-linux-gnu/libstdc++.so.6
[ -e "$libstdcxx" ] && export LD_PRELOAD=$libstdcxx

"$PYTHON" - "$GPU_LAYERS" <<'EOF' || exit 1
import socket, sys
try:
    from llm_engine import llama
except Exception as error:  # a library that is missing, of another release, or of another machine
    sys.exit(f"gpu.sh: {error}")
if sys.argv[1] != "0" and not llama.has_gpu():
    sys.exit("gpu.sh: these libraries find no GPU")
for port in (8091, 8092):
    with socket.socket() as found:
        if found.connect_ex(("127.0.0.1", port)) == 0:
            sys.exit(f"gpu.sh: something listens on port {port} already")
EOF

mkdir -p "$results"
failed=()
servers=()
trap 'kill "${servers[@]}" 2>/dev/null; wait' EXIT

part() {  # NAME LIMIT_S COMMAND...
  local name=$1 limit_s=$2 left_s=$((LIMIT_S - SECONDS))
  shift 2
  echo "== $name"
  if ((left_s < limit_s)); then limit_s=$left_s; fi
  ((limit_s > 0)) && timeout "$limit_s" "$@" 2>&1 | tee "$results/$name.txt" || failed+=("$name")
}

bench() {  # MODE[-NUMBER] LIMIT_S FLAGS...
  local name=$1 mode=${1%-[0-9]*} limit_s=$2
  shift 2
  part "$name" "$limit_s" "$PYTHON" -m bench "$mode" "$@" --json "$results/$name.json" --png "$results/$name.png"
}

await() {  # URL: until the model is loaded
  local until_s=$((SECONDS + 40))
  until "$PYTHON" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)' "$1" 2> /dev/null; do
    if ((SECONDS > until_s)); then
      echo "$1 does not answer" >&2
      exit 1
    fi
    sleep 0.2
  done
}

# llama.cpp counts all layers with a large number where llm-serve says -1.
[ "$GPU_LAYERS" = -1 ] && layers=999 || layers=$GPU_LAYERS

# The engine alone, before any server takes the GPU's memory.
part llama-batched-bench 30 "$folder/llama-batched-bench" -m "$model" -ngl "$layers" -fa on -b 2048 -ub 512 \
  -c $((256 * (64 + TOKENS))) -npp 64 -ntg "$TOKENS" -npl "$BATCHES"
for n in ${BATCHES//,/ }; do  # one by one: what is cut off by its limit leaves no figures
  bench "engine-$n" 30 --model "$model" --n-gpu-layers "$GPU_LAYERS" --batch "$n" --tokens "$TOKENS" \
    --rounds "$ROUNDS"
done
bench sampling 20 --model "$model" --n-gpu-layers "$GPU_LAYERS" --batch "$SAMPLED" --tokens 64

# Both servers with equal flags, one of them at work at a time.
"$PYTHON" -m llm_serve.cli --model "$model" --port 8091 --n-gpu-layers "$GPU_LAYERS" --max-inflight "$SLOTS" \
  --ctx-size "$CTX_SIZE" --batch-size "$BATCH_SIZE" --flash-attn on --ring-streams 1024 --max-in-flight-decodes 1024 \
  > "$results/llm-serve.log" 2>&1 & servers+=($!)
"$folder/llama-server" -m "$model" --port 8092 -ngl "$layers" -np "$SLOTS" -c $((SLOTS * CTX_SIZE)) \
  -b "$BATCH_SIZE" -ub "$BATCH_SIZE" -fa on --jinja > "$results/llama-server.log" 2>&1 & servers+=($!)
await http://127.0.0.1:8091/ready
await http://127.0.0.1:8092/health

both=(--url ours=http://127.0.0.1:8091 --url llama-server=http://127.0.0.1:8092 --rounds "$ROUNDS")
bench serve 60 "${both[@]}" --clients "$CLIENTS" --tokens "$TOKENS"
bench open-loop 60 "${both[@]}" --rate "$RATES" --seconds "$SECONDS_OF_ARRIVALS" --tokens "$TOKENS"
bench prefill-stall 35 "${both[@]}" --prompt-tokens "$PROMPT_TOKENS"
bench shared-prefix 25 "${both[@]}" --requests "$REQUESTS" --system-tokens "$SYSTEM_TOKENS"
bench conversation 25 "${both[@]}" --history "$PROMPT_TOKENS"

echo "${#failed[@]} parts failed: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
