# Tries the Debian package in a Debian of its own: cargo xtask deb --try. Runs as root, with sh -eu.

say() { echo "== $*"; }
fail() { echo "FAILED: $*" >&2; exit 1; }

say "install"
apt-get install --yes --no-install-recommends /opt/ringdisk.deb
dpkg --verify ringdisk

say "the program"
ringdisk --version
ringdisk create -q -f qcow2 /tmp/new.qcow2 1G
ringdisk info /tmp/new.qcow2
ringdisk check /tmp/new.qcow2

say "manual pages"
for page in ringdisk ringdisk-serve ringdisk-ctl ringdisk-create; do
    man --where "$page"
    man "$page" | grep -q ringdisk || fail "the manual page $page says nothing"
done

say "completion"
for shell in bash zsh; do
    "$shell" -n "$(dpkg -L ringdisk | grep -E "$shell.*completions/_?ringdisk$")" || fail "$shell cannot read it"
done
# The words that bash offers behind "ringdisk ser".
bash -c '
    source /usr/share/bash-completion/bash_completion
    # Its name differs between versions. It says with an error code that it has found something.
    _completion_loader ringdisk 2> /dev/null
    complete -p ringdisk > /dev/null 2>&1 || _comp_load ringdisk
    complete -p ringdisk
    COMP_WORDS=(ringdisk ser) COMP_CWORD=1 COMPREPLY=()
    "$(complete -p ringdisk | sed -E "s/.*-F ([^ ]+).*/\1/")" ringdisk ser ringdisk
    [[ " ${COMPREPLY[*]} " == *" serve "* ]]
' || fail "bash does not complete 'ringdisk ser' to 'serve'"

say "the user, and what it may use"
getent passwd ringdisk
id -nG ringdisk | grep -qw kvm || fail "the user is not in the group kvm"

say "units"
cp /usr/share/doc/ringdisk/examples/vm1.conf /opt/vm1.conf
systemd-analyze verify --man=yes ringdisk@vm1.service ringdisk@vm1.socket
systemd-analyze security --offline=true --threshold=15 ringdisk@vm1.service | tail -1

say "the example, served as its user"
install -d -o ringdisk -g kvm -m 0750 /var/lib/ringdisk /run/ringdisk/vm1
DISKS=$(sed -n 's/^DISKS=//p' /opt/vm1.conf)
UNIT=$(dpkg -L ringdisk | grep 'ringdisk@.service$')
SERVE=$(sed -n 's/^ExecStart=//p' "$UNIT" | sed "s/%i/vm1/g; s/ \$DISKS//")
setpriv --reuid=ringdisk --regid=kvm --clear-groups ringdisk create -q -f qcow2 /var/lib/ringdisk/vm1.qcow2 1G
# shellcheck disable=SC2086 # Words are parted by blanks, as in the unit.
setpriv --reuid=ringdisk --regid=kvm --clear-groups --no-new-privs --bounding-set=-all \
    $SERVE $DISKS &
server=$!
for _ in $(seq 600); do
    [ -S /run/ringdisk/vm1/control ] && break
    kill -0 "$server" || fail "serve ended"
    sleep 0.1
done
ringdisk ctl --control /run/ringdisk/vm1/control list
[ -S /run/ringdisk/vm1/root.sock ] || fail "there is no socket"
kill -TERM "$server"
wait "$server"

say "remove"
apt-get purge --yes ringdisk
[ -z "$(find /usr /etc -name '*ringdisk*' -print)" ] || fail "files stay: $(find /usr /etc -name '*ringdisk*')"
say "done"
