//! A `curl` line as a request: what a developer copies from a terminal, a bug report or a browser.
//!
//! Words are split as a POSIX shell does (quotes, backslashes, lines that go on), and `$'…'`, which browsers write. Nothing
//! is expanded. Options of curl that change what is sent are understood, those that only change how it is shown are skipped,
//! and any other is named. Credentials (`-u`, cookies) are skipped: nothing here looks at them, so nothing can show them.

use std::fs;

use super::request::Request;

/// Options that change nothing about the request, without and with a value.
const QUIET: &[&str] = &[
    "--compressed-ssh",
    "--fail",
    "--fail-with-body",
    "--globoff",
    "--http1.0",
    "--http1.1",
    "--http2",
    "--http3",
    "--include",
    "--insecure",
    "--ipv4",
    "--ipv6",
    "--location",
    "--no-buffer",
    "--no-progress-meter",
    "--path-as-is",
    "--progress-bar",
    "--silent",
    "--show-error",
    "--verbose",
    "-#",
    "-4",
    "-6",
    "-L",
    "-N",
    "-S",
    "-f",
    "-g",
    "-i",
    "-k",
    "-s",
    "-v",
];
const QUIET_WITH_VALUE: &[&str] = &[
    "--cacert",
    "--cert",
    "--connect-timeout",
    "--cookie",
    "--cookie-jar",
    "--key",
    "--max-time",
    "--oauth2-bearer",
    "--output",
    "--proxy",
    "--resolve",
    "--retry",
    "--user",
    "--write-out",
    "-E",
    "-b",
    "-c",
    "-m",
    "-o",
    "-u",
    "-w",
    "-x",
];
const KNOWN: &[&str] = &[
    "--compressed",
    "--data",
    "--data-ascii",
    "--data-binary",
    "--data-raw",
    "--get",
    "--head",
    "--header",
    "--json",
    "--referer",
    "--request",
    "--url",
    "--user-agent",
    "-A",
    "-G",
    "-H",
    "-I",
    "-X",
    "-d",
    "-e",
];

/// The words of a command line.
///
/// # Errors
/// A quote that is not closed.
pub fn words(line: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut rest = line.chars().peekable();
    let open = |quote: char| format!("a quote ({quote}) is not closed");
    while let Some(c) = rest.next() {
        match c {
            c if c.is_whitespace() => words.extend(word.take()),
            '\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match rest.next().ok_or_else(|| open('\''))? {
                        '\'' => break,
                        c => word.push(c),
                    }
                }
            }
            '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match rest.next().ok_or_else(|| open('"'))? {
                        '"' => break,
                        '\\' => match rest.next().ok_or_else(|| open('"'))? {
                            '\n' => {}
                            c @ ('"' | '\\' | '$' | '`') => word.push(c),
                            c => word.extend(['\\', c]),
                        },
                        c => word.push(c),
                    }
                }
            }
            '$' if rest.peek() == Some(&'\'') => {
                rest.next();
                ansi_c(&mut rest, word.get_or_insert_default())?;
            }
            '\\' => match rest.next() {
                None | Some('\n') => {}
                // A file that was written on Windows.
                Some('\r') => drop(rest.next_if_eq(&'\n')),
                Some(c) => word.get_or_insert_default().push(c),
            },
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    Ok(words)
}

/// The rest of `$'…'`, as bash reads it.
fn ansi_c(rest: &mut std::iter::Peekable<std::str::Chars<'_>>, word: &mut String) -> Result<(), String> {
    let open = || "a quote ($') is not closed".to_owned();
    loop {
        match rest.next().ok_or_else(open)? {
            '\'' => return Ok(()),
            '\\' => match rest.next().ok_or_else(open)? {
                'n' => word.push('\n'),
                'r' => word.push('\r'),
                't' => word.push('\t'),
                c @ ('u' | 'x') => {
                    let most = if c == 'u' { 4 } else { 2 };
                    let mut digits = String::new();
                    while let Some(digit) = rest.next_if(|c| digits.len() < most && c.is_ascii_hexdigit()) {
                        digits.push(digit);
                    }
                    let code = u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32);
                    word.push(code.ok_or_else(|| format!("\\{c}{digits} in $'…' is no character"))?);
                }
                c => word.push(c),
            },
            c => word.push(c),
        }
    }
}

/// What the options add up to.
#[derive(Default)]
struct Line {
    method: Option<String>,
    url: Option<String>,
    headers: Vec<(String, String)>,
    data: Option<Vec<u8>>,
    content_type: Option<&'static str>,
    accept: Option<&'static str>,
    compressed: bool,
    get: bool,
    head: bool,
    reads_no_files: bool,
}

/// The request of a curl line, with or without the word `curl` in front.
///
/// # Errors
/// What can't be understood of it, without any header's value.
pub fn parse(line: &str) -> Result<Request, String> {
    read(line, Line::default())
}

/// The same of a line that somebody else has sent: it reads no file (`-d @FILE`).
///
/// # Errors
/// What can't be understood of it, a file that it wants to read included.
pub fn parse_without_files(line: &str) -> Result<Request, String> {
    let line_of_another = Line {
        reads_no_files: true,
        ..Line::default()
    };
    read(line, line_of_another)
}

fn read(line: &str, mut read: Line) -> Result<Request, String> {
    let words = words(line)?;
    let mut words = words.into_iter().peekable();
    words.next_if(|word| word == "curl" || word.ends_with("/curl") || word == "$");
    words.next_if(|word| word == "curl");
    while let Some(word) = words.next() {
        if word == "-" || !word.starts_with('-') {
            if let Some(url) = read.url.replace(word) {
                return Err(format!("two addresses: {} and another one", without_query(&url)));
            }
            continue;
        }
        for (option, value) in options(&word, &mut words)? {
            read.take(&option, value)?;
        }
    }
    read.finish()
}

fn takes_value(option: &str) -> bool {
    QUIET_WITH_VALUE.contains(&option)
        || (KNOWN.contains(&option) && !["--compressed", "--get", "--head", "-G", "-I"].contains(&option))
}

/// One word of options: a long one, or short ones in a row, of which the last may have its value attached.
fn options(word: &str, words: &mut impl Iterator<Item = String>) -> Result<Vec<(String, String)>, String> {
    let mut next = |option: &str| words.next().ok_or_else(|| format!("{option} has no value"));
    if word.starts_with("--") {
        let (option, attached) = match word.split_once('=') {
            Some((option, value)) => (option.to_owned(), Some(value.to_owned())),
            None => (word.to_owned(), None),
        };
        let value = match attached {
            Some(value) => value,
            None if takes_value(&option) => next(&option)?,
            None => String::new(),
        };
        return Ok(vec![(option, value)]);
    }
    let mut found = Vec::new();
    let mut letters = word.chars();
    letters.next();
    while let Some(letter) = letters.next() {
        let option = format!("-{letter}");
        if takes_value(&option) {
            let attached = letters.as_str().to_owned();
            let value = if attached.is_empty() { next(&option)? } else { attached };
            found.push((option, value));
            break;
        }
        found.push((option, String::new()));
    }
    Ok(found)
}

impl Line {
    fn take(&mut self, option: &str, value: String) -> Result<(), String> {
        match option {
            "-X" | "--request" => self.method = Some(value),
            "--url" => self.url = Some(value),
            "-H" | "--header" => self.headers.extend(super::request::header(option, &value)?),
            "-A" | "--user-agent" => self.headers.push(("user-agent".to_owned(), value)),
            "-e" | "--referer" => self.headers.push(("referer".to_owned(), value)),
            "-d" | "--data" | "--data-ascii" | "--data-raw" | "--data-binary" | "--json" => {
                self.add_data(option, &value)?
            }
            "-G" | "--get" => self.get = true,
            "-I" | "--head" => self.head = true,
            "--compressed" => self.compressed = true,
            quiet if QUIET.contains(&quiet) || QUIET_WITH_VALUE.contains(&quiet) => {}
            unknown => {
                return Err(format!(
                    "the option {unknown} of curl is not understood here: leave it out, or say the request with --method, \
                     --path, -H and --body"
                ));
            }
        }
        Ok(())
    }

    fn add_data(&mut self, option: &str, value: &str) -> Result<(), String> {
        let piece = match value.strip_prefix('@').filter(|_| option != "--data-raw") {
            Some(_) if self.reads_no_files => {
                return Err(format!(
                    "{option} @… would read a file, which is not done here: paste what stands in it"
                ));
            }
            Some(file) => {
                let text = fs::read(file).map_err(|error| format!("{option} @{file}: cannot be read: {error}"))?;
                if matches!(option, "-d" | "--data" | "--data-ascii") {
                    // As curl does.
                    text.into_iter()
                        .filter(|byte| !matches!(byte, b'\r' | b'\n' | 0))
                        .collect()
                } else {
                    text
                }
            }
            None => value.as_bytes().to_vec(),
        };
        match &mut self.data {
            None => self.data = Some(piece),
            Some(data) => {
                if option != "--json" {
                    data.push(b'&');
                }
                data.extend(piece);
            }
        }
        if option == "--json" {
            self.content_type = Some("application/json");
            self.accept = Some("application/json");
        } else {
            self.content_type.get_or_insert("application/x-www-form-urlencoded");
        }
        Ok(())
    }

    fn finish(self) -> Result<Request, String> {
        let url = self.url.ok_or("no address: a curl line needs one")?;
        let rest = url.split_once("://").map_or(url.as_str(), |(_, rest)| rest);
        let (authority, path) = match rest.find(['/', '?', '#']) {
            Some(at) => rest.split_at(at),
            None => (rest, "/"),
        };
        let mut path = path.split('#').next().unwrap_or("/").to_owned();
        if !path.starts_with('/') {
            path.insert(0, '/');
        }
        let mut data = self.data;
        if self.get
            && let Some(query) = data.take()
        {
            path.push(if path.contains('?') { '&' } else { '?' });
            path.push_str(&String::from_utf8_lossy(&query));
        }
        let method = self.method.unwrap_or_else(|| {
            let method = if self.head {
                "HEAD"
            } else if data.is_some() {
                "POST"
            } else {
                "GET"
            };
            method.to_owned()
        });
        let mut request = Request {
            method,
            path,
            // A name and a password in the address are no part of the authority.
            authority: Some(authority.rsplit('@').next().unwrap_or_default().to_owned()),
            headers: self.headers,
            body: data.unwrap_or_default(),
        };
        if !request.body.is_empty()
            && let Some(content_type) = self.content_type
        {
            request.default_header("content-type", content_type);
        }
        if let Some(accept) = self.accept {
            request.default_header("accept", accept);
        }
        if self.compressed {
            request.default_header("accept-encoding", "deflate, gzip, br, zstd");
        }
        Ok(request)
    }
}

fn without_query(url: &str) -> &str {
    let url = url.split('?').next().unwrap_or_default();
    // Nor what stands before an @: that may be a password.
    url.rsplit('@').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_split_as_a_shell_does() {
        let line = "a  'b c' \"d \\\"e\\\" \\x\" f\\ g \\\n h'i'\"j\" $'k\\'l\\u0041\\n' ''";
        let expected = ["a", "b c", "d \"e\" \\x", "f g", "hij", "k'lA\n", ""];
        assert_eq!(words(line).unwrap(), expected);
        for open in ["'a", "\"a", "$'a", "\"a\\"] {
            assert!(words(open).unwrap_err().contains("is not closed"), "{open}");
        }
    }

    #[test]
    fn a_line_is_the_request_that_curl_would_send() {
        let line = "curl -sS -XPOST 'https://api.example.com:8443/v1/chat?x=1#y' \\\n  -H 'X-Admission-Owner-Id: o' \
                    -H'empty;' -u me:hunter2 -b 'a=b' --compressed --data '{\"model\":\"m\"}' -d b";
        let request = parse(line).unwrap();
        assert_eq!(
            (request.method.as_str(), request.path.as_str()),
            ("POST", "/v1/chat?x=1")
        );
        assert_eq!(request.authority.as_deref(), Some("api.example.com:8443"));
        assert_eq!(request.body, b"{\"model\":\"m\"}&b");
        let expected = [
            ("x-admission-owner-id", "o"),
            ("empty", ""),
            ("content-type", "application/x-www-form-urlencoded"),
            ("accept-encoding", "deflate, gzip, br, zstd"),
        ];
        let headers: Vec<_> = request.headers.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
        assert_eq!(headers, expected);
        let request = parse("curl localhost:10000 --json '{}'").unwrap();
        assert_eq!((request.method.as_str(), request.path.as_str()), ("POST", "/"));
        let request = parse("curl -G http://u:p@h/a -d x=1").unwrap();
        assert_eq!((request.method.as_str(), request.path.as_str()), ("GET", "/a?x=1"));
        assert_eq!(request.authority.as_deref(), Some("h"));
    }

    #[test]
    fn what_is_not_understood_is_named_and_no_credential_is() {
        for (line, why) in [
            ("curl -F a=b http://h/", "the option -F of curl is not understood"),
            ("curl --upload-file x http://h/", "the option --upload-file"),
            ("curl http://h/ -H", "-H has no value"),
            ("curl -X POST", "no address"),
            (
                "curl http://u:hunter2@h/?k=hunter2 http://i/",
                "two addresses: h/ and another one",
            ),
            (
                "curl http://h/ -H 'Authorization Bearer hunter2'",
                "-H \"Authorization\"",
            ),
            ("curl http://h/ -d @nowhere.json", "-d @nowhere.json: cannot be read"),
        ] {
            let fault = parse(line).unwrap_err();
            assert!(fault.contains(why) && !fault.contains("hunter2"), "{line}: {fault}");
        }
    }
}
