# shellcheck shell=bash
# Sourced by every recipe: checks whatever can be checked before the first process starts. What is wrong is one line.

fail() {
    printf '%s: %s\n' "${RECIPE##*recipes/}" "$*" >&2
    exit 1
}

# check_number NAME [MINIMUM [MAXIMUM]]: a variable holds a whole number in the range.
check_number() {
    local name=$1 minimum=${2:-1} maximum=${3:-99999}
    [[ ${!name} =~ ^(0|[1-9][0-9]{0,4})$ && ${!name} -ge $minimum && ${!name} -le $maximum ]] ||
        fail "$name=${!name} is not a whole number of $minimum to $maximum"
}

# value_of FLAG DEFAULT ARGUMENTS...: what ms-swift will take, which is the last value that is given.
value_of() {
    local name=__$1 value=$2
    shift 2
    while [ $# -gt 0 ]; do
        case ${1//-/_} in
            "$name") value=${2-} ;;
            "$name"=*) value=${1#*=} ;;
        esac
        shift
    done
    printf '%s' "$value"
}

# A name on a model hub: owner/name, not a path that was mistyped.
is_hub_name() { [[ $1 =~ ^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._:#-]*$ ]]; }

check_inputs() {
    if [ -e "$MODEL" ]; then
        [ -f "$MODEL/config.json" ] || fail "MODEL=$MODEL is no checkpoint folder: it holds no config.json"
    else
        is_hub_name "$MODEL" || fail "MODEL=$MODEL is neither a folder nor a hub name such as $RECIPE_MODEL"
    fi
    local file=$DATA
    [[ -e $file || ! $file =~ \#[0-9]+$ ]] || file=${file%#*} # ms-swift: so many samples of it
    if [ -e "$file" ]; then
        [[ -f $file && -r $file ]] || fail "DATA=$DATA is not a readable file"
        [ -s "$file" ] || fail "DATA=$DATA is empty"
    elif [[ $file =~ \.(jsonl?|csv|parquet|txt)$ ]] || ! is_hub_name "$DATA"; then
        fail "DATA=$DATA is neither a file nor a hub name"
    fi
    mkdir -p "$OUTPUT" 2>/dev/null || true
    [[ -d $OUTPUT && -w $OUTPUT ]] || fail "OUTPUT=$OUTPUT cannot be made or written to"
    command -v megatron >/dev/null ||
        fail "no megatron command on PATH; activate the environment that holds ms-swift and fla-safe"
    [ "${TORCH_DEVICE_BACKEND_AUTOLOAD:-1}" != 0 ] ||
        fail "TORCH_DEVICE_BACKEND_AUTOLOAD=0 hides --gdn_impl from ms-swift; unset it"
    case ${USE_MCORE_GDN:-1} in
        1 | true | True | TRUE | yes | Yes | YES | y | on) ;;
        *) fail "USE_MCORE_GDN=$USE_MCORE_GDN builds GDN layers that no Megatron plug-in reaches; unset it" ;;
    esac
}

# GPUs that processes of this node will see, or nothing where no driver answers.
visible_gpus() {
    local count=0
    local devices
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        IFS=, read -ra devices <<<"$CUDA_VISIBLE_DEVICES"
        # CUDA looks no further than the first entry that names no GPU.
        while [[ ${devices[count]-} == [!-]* ]]; do count=$((count + 1)); done
        echo "$count"
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true
    fi
}

check_nodes() {
    local gpus
    check_number NNODES
    check_number NPROC_PER_NODE
    check_number NODE_RANK 0
    check_number MASTER_PORT 1 65535
    [ "$NODE_RANK" -lt "$NNODES" ] || fail "NODE_RANK=$NODE_RANK, but NNODES=$NNODES nodes count from 0"
    if [ "$NNODES" -gt 1 ]; then
        [ -n "${MASTER_ADDR:-}" ] ||
            fail "MASTER_ADDR is not set; $NNODES nodes need the address of the first (recipes/slurm.sh finds it)"
    fi
    gpus=$(visible_gpus)
    [ "${gpus:-0}" -ge "$NPROC_PER_NODE" ] ||
        fail "${gpus:-no} GPUs are visible, and $NPROC_PER_NODE processes a node need one each; set NPROC_PER_NODE"
}

# check_sizes TP PP EP CP MICRO_BATCH GLOBAL_BATCH FLAGS...: the number of GPUs fits them, or what flags say instead.
check_sizes() {
    local tp pp ep cp micro batch size
    tp=$(value_of tensor_model_parallel_size "$1" "${@:7}")
    pp=$(value_of pipeline_model_parallel_size "$2" "${@:7}")
    ep=$(value_of expert_model_parallel_size "$3" "${@:7}")
    cp=$(value_of context_parallel_size "$4" "${@:7}")
    micro=$(value_of micro_batch_size "$5" "${@:7}")
    batch=$(value_of global_batch_size "$6" "${@:7}")
    for size in tp pp ep cp micro batch; do check_number $size; done
    local world=$((NNODES * NPROC_PER_NODE))
    [ $((world % (tp * pp * cp))) -eq 0 ] ||
        fail "$NNODES x $NPROC_PER_NODE = $world GPUs cannot be divided by TP$tp x PP$pp x CP$cp"
    [ $((world % (pp * ep))) -eq 0 ] ||
        fail "$NNODES x $NPROC_PER_NODE = $world GPUs cannot be divided by PP$pp x EP$ep"
    local replicas=$((world / (tp * pp * cp)))
    [ $((batch % (micro * replicas))) -eq 0 ] ||
        fail "global batch $batch cannot be divided by micro-batch $micro x $replicas model replicas"
}
