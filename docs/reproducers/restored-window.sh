#!/bin/sh
# --swa-full: a restored slot is cut inside the window, where its cells are missing; the logits are wrong.
#   LLAMA_SERVER=llama-server MODEL=model.gguf sh restored-window.sh   exit code 0: it happens, 1: it does not
# MODEL has a sliding window, such as Gemma 3; its vocabulary has more than 1,000 tokens.
set -eu
url=http://127.0.0.1:${PORT:=8099} dir=$(mktemp -d)
$LLAMA_SERVER -m "$MODEL" --port "$PORT" -np 1 -c 4096 --swa-full --slot-save-path "$dir" >"$dir/log" 2>&1 & server=$!
trap 'kill $server; rm -r "$dir"' EXIT
curl -sf --retry 300 --retry-delay 1 --retry-all-errors "$url/health" >"$dir/health"

ids() { awk -v n="$1" 'BEGIN { for (i = 0; i < n; i++) printf "%s%d", (i ? "," : ""), 5 + i * 7919 % 900 }'; }
ask() { # TOKENS, more of the body: print the tokens that were reused, and the first logprob
  curl -sf "$url/completion" -d '{"prompt":['"$(ids "$1")"'],"n_predict":1,"n_probs":1,"temperature":0,
    "response_fields":["timings/cache_n","completion_probabilities"]'"$2"'}' |
    sed 's/.*"timings\/cache_n":\([0-9]*\).*"logprob":\([-0-9.e]*\)}.*/\1 \2/'
}
act() { curl -sf "$url/slots/0?action=$1" -d '{"filename":"state"}' >"$dir/act"; }

ask 1000 ',"cache_prompt":false' >"$dir/first"
act save
live=$(ask 900 '') # the slot is cut back by 100 tokens
act erase
act restore
restored=$(ask 900 '') # the same cut
fresh=$(ask 900 ',"cache_prompt":false')
echo "reused tokens and logprob of the next one: live $live, restored $restored, fresh $fresh"
echo "$live $restored $fresh" | awk '{ off = $4 - $6; if (off < 0) off = -off
  noise = $2 - $6; if (noise < 0) noise = -noise
  exit !($3 > 0 && off > 0.05 && off > 10 * noise) }'
