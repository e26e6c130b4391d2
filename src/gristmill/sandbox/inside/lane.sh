# A supervisor that is reached by a byte stream. It runs one call at a time; a sandbox may have more lanes, each with a
# stream of its own. The host puts in front: first (empty for a later lane), limited (set where there is a limit on
# processes); and stream.sh.
#
# FROM is the number of the stateful call whose directory and variables are taken over, 0 at first; TO is one's own. What
# follows an order's line: a directory of D bytes, a text of T bytes, data of N bytes, which hold no NUL (t) or may (b).
#
#   x ID D T N KIND FROM TO   run a command in the shell and keep what it leaves; the data are its stdin
#   y ID D T N KIND FROM      the same, but keep nothing
#   g ID T COUNT FROM         print the first COUNT bytes of the file whose path is the text
#   p ID T N KIND FROM        write the data into the file whose path is the text
#   k ID GROUP                kill all processes of a call, also of another stream's        -> k ID CODE
#   w ID PID                  has it ended? no answer: not yet                              -> d ID CODE
#   m ID                      is there room to start a process? if not, make it             -> m ID CLEARED
#
# Further reports: r ready · e SENTENCE cannot start · s ID its output follows · d ID CODE KEPT ended (KEPT is 1 where it
# left a state) · f ID ERRNO refused · n ID DIRECTORY had vanished, so this runs in the workspace · b ID not started, because
# children of an earlier call hold the stream's output · m ID 1 what was left running had to be ended

# With a handler, because a signal that pid 1 ignores would be ignored by all commands too.
trap : HUP INT QUIT ILL TRAP ABRT BUS FPE USR1 SEGV USR2 PIPE ALRM TERM XCPU XFSZ VTALRM SYS
cd /
current='' pid='' save='' text='' never=''
[[ $limited ]] && exec {never}<> <(:) # what never can be read: a pause without a process
seen=()

# The call that ended last has reported, but the process that did so may still be there.
settle() {
    [[ $pid ]] && wait "$pid"
    current='' pid=''
}

# Whether a process other than this one has the output of this lane open. Each process is looked at once: it cannot get it
# later. One of another user that cannot be looked at is taken for one that has, if it came while this lane was in use.
held() {
    local number files file found=() answer=1
    for number in /proc/[0-9]*; do
        number=${number#/proc/}
        [[ $number == "$$" ]] && continue
        if [[ ! ${seen[number]-} ]]; then
            files=(/proc/$number/fd/*)
            if [[ ${files[0]} == *'*' ]]; then
                read -r file <"/proc/$number/stat" || continue
                [[ $file == *') '[ZX]' '* ]] || answer=0
            fi
            for file in "${files[@]}"; do
                [[ $file -ef /proc/$$/fd/1 ]] && answer=0 && break
            done
        fi
        found[number]=1
    done
    seen=()
    for number in "${!found[@]}"; do seen[number]=1; done
    return "$answer"
}

crowded() {
    local place most='' now='' room
    for place in /sys/fs/cgroup/pids /sys/fs/cgroup; do
        read -r most <"$place/pids.max" && read -r now <"$place/pids.current" && break
    done
    [[ $now && $most != max ]] || return
    room=$((most / 4 < 16 ? most / 4 : 16))
    ((now > most - room))
}

# Without room nothing could be started any more, and a shell that cannot fork exits. So all that is left running goes.
make_room() { # id
    local round=0
    [[ $limited && $$ == 1 ]] && crowded || return
    kill -KILL -1
    while crowded && ((round++ < 100)); do
        read -rt 0.02 -u "$never"
    done
    report m "$1" 1
}

# Copies data of the stream to stdout. What cannot be written is read all the same, or it would be taken for orders.
receive() { # bytes kind
    local left=$1 size code=0
    if [[ $2 == t ]]; then
        take "$1"
        printf %s "$text"
        return
    fi
    while ((left)); do
        size=$((left < 1048576 ? left : 1048576))
        left=$((left - size))
        if ((code)); then
            dd bs="$size" count=1 iflag=fullblock status=none >/dev/null
        else
            dd bs="$size" count=1 iflag=fullblock status=none || code=1
        fi
    done
    return "$code"
}

launch() { # verb id directory text bytes kind from to
    local input=/dev/null directory
    take "$3"
    directory=$text
    take "$4"
    take_over "$7"
    printf '%s\0%s\0' "$directory" "$text" >"$io/$$.sh"
    if (($5)); then
        input=$io/$2.in
        receive "$5" "$6" >"$input"
    fi
    if held; then
        report b "$2"
        return
    fi
    save=''
    if [[ $1 == x ]]; then
        save=$io/$(($8 % 16))
        : >"$save.cwd" >"$save"
    fi
    current=$2
    enter_directory "$2"
    report s "$2"
    # Who waits for the shell must outlive it, whatever it sends to its own process group. The input is opened here, not in
    # the child, because it is removed next.
    {
        {
            trap : HUP INT QUIT ABRT USR1 USR2 PIPE ALRM TERM
            (run "$2" "$save")
            code=$?
            if [[ $save && -s $save.cwd ]]; then report d "$2" "$code" 1; else report d "$2" "$code"; fi
            exit "$code"
        } 2>&1 &
    } <"$input"
    pid=$!
    [[ $input == /dev/null ]] || rm -f -- "$input"
}

# Sets `path` to the absolute form of the path that follows.
resolve() { # bytes from
    take "$1"
    take_over "$2"
    case $text in
        '~' | '~/'*) path=$home${text#'~'} ;;
        /*) path=$text ;;
        *) path=$cwd/$text ;;
    esac
}

get() { # id path count from
    local path errno=''
    resolve "$2" "$4"
    if [[ -d $path ]]; then errno=21
    elif [[ ! -e $path ]]; then errno=2
    elif [[ ! -f $path ]]; then errno=22
    elif [[ ! -r $path ]]; then errno=13
    fi
    if [[ $errno ]]; then
        report f "$1" "$errno"
        return
    fi
    if held; then
        report b "$1"
    else
        report s "$1"
        head -c "$3" -- "$path" </dev/null
        report d "$1" "$?"
    fi
}

put() { # id path bytes kind from
    local path parent errno='' said=$io/$$.said code=1 taken=''
    resolve "$2" "$5"
    parent=${path%/*}
    if [[ -d $path || $path == */ ]]; then errno=21
    elif [[ -e $path && ! -f $path ]]; then errno=22
    elif [[ -e $path && ! -w $path ]]; then errno=13
    fi
    if [[ $errno ]]; then
        receive "$3" "$4" >/dev/null
        report f "$1" "$errno"
        return
    fi
    {
        if [[ -d ${parent:-/} ]] || mkdir -p -- "$parent"; then
            {
                taken=1
                receive "$3" "$4" && code=0
            } >"$path"
        fi
    } 2>"$said"
    [[ $taken ]] || receive "$3" "$4" >/dev/null
    if ((code)); then
        report s "$1"
        cat -- "$said"
    fi
    report d "$1" "$code"
}

kill_call() { # id group
    local code=137
    if [[ $1 == "$current" ]]; then
        kill_all "$mark$1" "$pid"
        wait "$pid"
        code=$? current=''
    else
        kill_all "$mark$1" "$2"
    fi
    report k "$1" "$code"
}

ended() { # id pid
    local code=137
    if [[ $1 == "$current" ]]; then
        kill -0 "$pid" && return
        wait "$pid"
        code=$?
    elif [[ $2 ]]; then
        kill -0 "$2" && return
    fi
    report d "$1" "$code"
}

if [[ $first ]]; then
    for program in cat dd head mkdir rm; do
        type -P "$program" >/dev/null || {
            report e "There is no program $program inside, which the sandbox needs."
            exit 1
        }
    done
    lay_out || {
        report e "The directory $io cannot be written inside."
        exit 1
    }
    [[ $start == "$workspace"/* ]] && mkdir -p -- "$start"
    if [[ ! -d $start || ! -x $start ]]; then
        report e "The working directory $start does not exist inside, or cannot be entered."
        exit 1
    fi
fi
held
report r
while IFS=' ' read -r verb id one two three four five six; do
    if [[ $verb == [xygp] ]]; then
        settle
        make_room "$id"
    fi
    case $verb in
        x | y) launch "$verb" "$id" "$one" "$two" "$three" "$four" "$five" "$six" ;;
        g) get "$id" "$one" "$two" "$three" ;;
        p) put "$id" "$one" "$two" "$three" "$four" ;;
        k) kill_call "$id" "$one" ;;
        w) ended "$id" "$one" ;;
        m) make_room "$id" || report m "$id" ;;
    esac
done
exit 0
