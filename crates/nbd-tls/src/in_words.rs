//! Errors of TLS in words for a person.

use rustls::{AlertDescription, CertificateError, Error};
use std::io;

/// Says why TLS failed, and what can be done about it where that is known.
#[must_use]
pub fn in_words(error: &io::Error) -> String {
    let why = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    match (why.and_then(known), error.kind()) {
        (Some(known), _) => known.to_owned(),
        (None, io::ErrorKind::UnexpectedEof) => "the peer closed the connection during the handshake".to_owned(),
        (None, _) => error.to_string(),
    }
}

/// As [`in_words`], for an error after the handshake.
pub(crate) fn said_of(error: &Error) -> String {
    known(error).map_or_else(|| format!("TLS: {error}"), |known| format!("TLS: {known}"))
}

fn known(error: &Error) -> Option<&'static str> {
    match error {
        Error::AlertReceived(alert) => of_alert(*alert),
        Error::InvalidCertificate(why) => of_certificate(why),
        Error::NoCertificatesPresented => Some("the client has shown no certificate"),
        Error::InvalidMessage(_) => Some("the peer does not speak TLS"),
        _ => None,
    }
}

/// Puts a peer's alert into words.
fn of_alert(alert: AlertDescription) -> Option<&'static str> {
    use AlertDescription as Alert;
    Some(match alert {
        // Peers with TLS 1.2 have no word for a missing certificate.
        Alert::CertificateRequired => {
            "the peer wants a certificate: put client-cert.pem and client-key.pem beside ca-cert.pem"
        }
        Alert::HandshakeFailure => {
            "the peer refused the handshake; it may want a certificate (client-cert.pem and client-key.pem)"
        }
        Alert::UnknownCA | Alert::BadCertificate | Alert::DecryptError => {
            "the peer does not trust the certificate that it was shown, or not its authority (ca-cert.pem)"
        }
        Alert::CertificateRevoked => "the peer says that the certificate was revoked",
        Alert::CertificateExpired => "the peer says that the certificate has expired",
        Alert::ProtocolVersion => "the peer has no version of TLS in common with us: 1.2 or 1.3 is needed",
        _ => return None,
    })
}

/// Says what is wrong with the peer's certificate.
fn of_certificate(error: &CertificateError) -> Option<&'static str> {
    use CertificateError as Wrong;
    Some(match error {
        // `BadSignature` is an authority of the same name with another key.
        Wrong::UnknownIssuer | Wrong::BadSignature => "the peer's certificate is not of the authority in ca-cert.pem",
        Wrong::Expired | Wrong::ExpiredContext { .. } => "the peer's certificate has expired",
        Wrong::NotValidYet | Wrong::NotValidYetContext { .. } => {
            "the peer's certificate is not valid yet: compare the clocks"
        }
        Wrong::Revoked => "the peer's certificate was revoked (ca-crl.pem)",
        Wrong::ExpiredRevocationList | Wrong::ExpiredRevocationListContext { .. } => {
            "the list of revoked certificates (ca-crl.pem) has expired"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_person_can_do_something_about_is_said_in_words_and_the_rest_as_it_is() {
        let said = |error: Error| in_words(&io::Error::new(io::ErrorKind::InvalidData, error));
        assert!(said(Error::AlertReceived(AlertDescription::CertificateRequired)).contains("client-cert.pem"));
        assert!(said(Error::InvalidCertificate(CertificateError::UnknownIssuer)).contains("ca-cert.pem"));
        assert!(said(Error::InvalidCertificate(CertificateError::Revoked)).contains("ca-crl.pem"));
        let other = Error::General("something else".to_owned());
        assert_eq!(said(other.clone()), other.to_string());
        assert!(in_words(&io::ErrorKind::UnexpectedEof.into()).contains("closed"));
        assert_eq!(in_words(&io::Error::other("plain")), "plain");
    }
}
