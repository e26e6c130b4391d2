# Looks after the sandboxes that one connection made on a host: each has a directory, and its processes carry SBX_CALL with
# `NAME.s-N.` in front. When the connection is gone, all of them go. The host puts in front: token, name, label; and
# processes.sh.
#
#   n N        make the directory of sandbox N            -> m N
#   e PLACE    end NAME or NAME/s-N, anyone's of this user: kill its processes, remove its directory    -> g PLACE
#   l          list the directories of keepers            -> l NAME 1 LABEL (its keeper lives) · l NAME 0 LABEL (not) · l
#
# Further reports: r DIRECTORY ready; NAME is in it · e SENTENCE cannot start

exec 2>/dev/null
trap : HUP INT QUIT TERM PIPE
umask 077
unset script SBX_CALL
base=${TMPDIR:-/tmp} LC_ALL=C

report() { printf '\0\1%s%s\n' "$token" "$*"; }

finish() { # place
    kill_all "${1/\//.}.*"
    rm -rf -- "$base/$1" || {
        chmod -R u+rwx -- "$base/$1"
        rm -rf -- "$base/$1"
    }
}

list() {
    local entry pid place text living=' '
    for pid in /proc/[0-9]*; do
        while IFS= read -rd '' entry; do
            [[ $entry == SBX_CALL=*.keeper ]] && entry=${entry#SBX_CALL=} living+="${entry%.keeper} "
        done <"$pid/environ"
    done
    for place in "$base/${name%-*}"-*; do
        [[ -d $place && -O $place && ! -L $place ]] || continue
        read -r text <"$place/label"
        place=${place##*/} entry=0
        [[ $living == *" $place "* ]] && entry=1
        report l "$place" "$entry" "$text"
    done
    report l
}

if [[ ! -r /proc/self/environ ]]; then
    report e 'It has no /proc, which is needed to find the processes of a sandbox.'
elif [[ ! -d $base || ! -w $base || ! -x $base ]]; then
    report e "The directory $base cannot be written."
elif ! type -P rm mkdir chmod cat dd head >/dev/null; then
    report e 'It lacks one of the programs rm, mkdir, chmod, cat, dd, head.'
else
    report r "$base"
    while IFS=' ' read -r verb place; do
        case $verb in
            n)
                [[ -d $base/$name ]] || { mkdir -- "$base/$name" && printf '%s\n' "$label" >"$base/$name/label"; }
                mkdir -- "$base/$name/s-$place" && report m "$place"
                ;;
            e) { finish "$place" && report g "$place"; } & ;;
            l) list ;;
        esac
    done
    finish "$name"
fi
